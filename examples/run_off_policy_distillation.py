"""Off-policy distillation from any set of teachers; with no arguments, the demo on this machine."""

from pathlib import Path

from nemo_opd.config.run import RunConfig
from nemo_opd.training.cli import loading, main
from nemo_opd.training.inputs import check_inputs

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def distil(config: RunConfig) -> None:
    check_inputs(config, on_policy=False)
    # Imported once settings and paths are known to be right: PyTorch takes seconds.
    with loading("PyTorch"):
        from nemo_opd.training.off_policy import distil

    distil(config)


if __name__ == "__main__":
    main(distil, config_dir=CONFIGS, config_name="off_policy_demo")
