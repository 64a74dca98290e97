"""What a rank is doing, in the words of a user: methods of workers are ours, the phases of a run are theirs."""

ACTIVITIES = {
    "start": "loading its model",
    "load": "reading the checkpoint",
    "forward": "reading a batch",
    "bits_per_byte": "reading the validation texts",
    "train_step": "training on a batch",
    "evaluate": "validating",
    "generate": "continuing prompts",
    "save": "writing a checkpoint",
    "export": "writing the trained model",
    "hold_weights": "giving its weights to the rollout server",
    "join_link": "connecting to the student's ranks on other nodes",
    "join_links": "connecting to teachers' ranks on other nodes",
    "send": "sending its output to other nodes",
    "receive": "receiving teachers' output from other nodes",
    "close": "releasing its memory",
}


def activity(method: str, about: str = "") -> str:
    """`about`: which one, such as `step 12`."""
    doing = ACTIVITIES.get(method, f"in {method!r}")
    return f"{doing} ({about})" if about else doing
