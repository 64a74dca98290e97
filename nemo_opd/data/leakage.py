"""Bytes of a response that also occur in a teacher's context (methods.md §13)."""

LEAST = 16
"""Length of the shortest common run that counts: three or four words, which rarely match by chance."""


def leakage(response: str, context: str, prompt: str) -> tuple[int, int]:
    """Return how many bytes of the response leak from the context, and how many it has, in UTF-8.

    A byte leaks if it lies in a run of at least `LEAST` bytes that occurs in the context and not in the prompt, which
    the student reads itself. prompt: the student's.
    """
    data = response.encode()
    leaked = _windows(context.encode()) - _windows(prompt.encode())
    count = counted_to = 0
    for start in range(len(data) - LEAST + 1):
        if data[start : start + LEAST] in leaked:
            stop = start + LEAST
            count += stop - max(start, counted_to)
            counted_to = stop
    return count, len(data)


def _windows(data: bytes) -> set[bytes]:
    return {data[start : start + LEAST] for start in range(len(data) - LEAST + 1)}
