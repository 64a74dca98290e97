"""On-policy distillation from any set of teachers; with no arguments, the demo on this machine."""

from pathlib import Path

from nemo_opd.config.run import RunConfig
from nemo_opd.training.cli import busy, main

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def distil(config: RunConfig) -> None:
    # Imported once the settings are known to be valid: PyTorch and Ray take seconds.
    with busy("loading PyTorch and Ray"):
        from nemo_opd.training.on_policy import distil

    distil(config)


if __name__ == "__main__":
    main(distil, config_dir=CONFIGS, config_name="on_policy_demo")
