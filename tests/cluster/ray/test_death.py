"""Messages about a dead actor for users."""

import pytest
import ray

from nemo_opd.cluster.ray.calls import death_message

DETAILS = "The actor died unexpectedly before finishing this task.\n\tclass_name: RankActor\n\tpid: 7\n\tip: 10.0.0.2\n"


@pytest.mark.parametrize(
    ("ray_message", "expected"),
    [
        (
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
            "Worker unexpectedly exits with a connection error code 2.",
            "(its process on 10.0.0.2 was killed or crashed); host memory may have run out: lower train.micro_batch_si",
        ),
        (
            "The actor died because its node has died. Node Id: 1f2e\n\tthe actor's node was terminated",
            "(its Ray node on 10.0.0.2 is gone); start the node again, or lower cluster.num_nodes; ",
        ),
        (
            "Task was killed due to the node running low on memory.\nMemory on the node was 22.90GB / 24.00GB",
            "(Ray ended its process on 10.0.0.2, as the memory of the node was nearly full); host memory may have run",
        ),
    ],
    ids=["killed", "node", "memory"],
)
def test_what_is_known(ray_message: str, expected: str) -> None:
    message = death_message(ray.exceptions.RayActorError(error_msg=DETAILS + ray_message))

    assert message.startswith(expected)
    assert message.endswith("run.resume=auto continues from the last checkpoint")


def test_an_import_that_fails_is_told_with_its_cause() -> None:
    """Bug: the message ends at its first full stop, before the name of the file that shadows a package."""
    ray_message = (
        "The actor died because of an error raised in its creation task, ray::RankActor.__init__() (pid=7, ip=10.0.0.2)"
        "\nRuntimeError: The actor with name RankActor failed to import on the worker. This may be because needed "
        "library dependencies are not installed in the worker environment:\n\nTraceback (most recent call last):\n  "
        "File \"function_manager.py\", line 7, in load\nImportError: cannot import name 'Tokenizer' from 'tokenizers' "
        "(/home/me/tokenizers.py)\n"
    )
    message = death_message(ray.exceptions.RayActorError(error_msg=ray_message))

    assert "ImportError: cannot import name 'Tokenizer' from 'tokenizers' (/home/me/tokenizers.py)" in message
    assert "rename it" in message


def test_anything_else_is_told_as_it_is() -> None:
    message = death_message(ray.exceptions.RaySystemError("System error: no idea. At all"))

    assert message == "(System error: System error: no idea); run.resume=auto continues from the last checkpoint"
