"""The longest prefix of a token among given contents, by brute force."""


def longest(token: bytes, contents: list[bytes]) -> bytes:
    """Return the longest content that the token begins with, or b""."""
    return max((content for content in contents if content and token.startswith(content)), key=len, default=b"")
