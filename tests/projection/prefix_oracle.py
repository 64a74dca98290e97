"""The longest content that a token begins with, by brute force."""


def longest(token: bytes, contents: list[bytes]) -> bytes:
    """Every content is looked at."""
    return max((content for content in contents if content and token.startswith(content)), key=len, default=b"")
