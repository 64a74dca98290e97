"""Workers of a running cluster get the driver's environment variables, and its secrets separately."""

from types import SimpleNamespace

import pytest
import ray

from nemo_opd.cluster.ray import ray_session
from nemo_opd.cluster.ray.ray_session import RaySession
from nemo_opd.cluster.ray.services import forwarded, forwarded_secrets

ENVIRONMENT = {
    "HF_HOME": "/models",
    "HF_TOKEN": "hf_secret",
    "HF_PROXY_PASSWORD": "secret",
    "NCCL_SOCKET_IFNAME": "eth1",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "HOME": "/root",
    "WANDB_API_KEY": "secret",
}


def test_what_everyone_can_read_has_no_secrets() -> None:
    assert forwarded(ENVIRONMENT).keys() == {"HF_HOME", "NCCL_SOCKET_IFNAME", "PYTORCH_ALLOC_CONF"}
    assert forwarded_secrets(ENVIRONMENT) == {"HF_TOKEN": "hf_secret", "HF_PROXY_PASSWORD": "secret"}


def test_a_cluster_that_is_joined_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    init_options: dict[str, dict[str, dict[str, str]]] = {}
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.setattr(ray_session, "probe", lambda _: None)
    monkeypatch.setattr(ray, "init", lambda **options: init_options.update(options))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=None))

    RaySession("auto", num_cpus=1)

    assert init_options["runtime_env"]["env_vars"]["HF_HOME"] == "/models"
