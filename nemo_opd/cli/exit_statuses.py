"""Exit statuses of the command."""

ENDED_EARLY = 75
"""EX_TEMPFAIL of sysexits.h: try again later."""
INTERRUPTED = 130
"""By shell convention, 128 plus the number of the signal SIGINT."""
MEANINGS = {
    0: "done: the run, the dry run or the command ended as asked; a worse student is not exported (run.export_worse)",
    1: "an error, or a run that does not fit: the last lines on stderr say why",
    2: "wrong options of a command without settings, or no such command",
    ENDED_EARLY: "the run ended before its last step, also by a callback or an alarm; run.resume=auto continues it",
    INTERRUPTED: "interrupted before it could save",
}
"""Meaning of each status, for users."""
