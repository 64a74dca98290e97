"""On-policy distillation from any set of teachers; with no arguments, the demo on this machine."""

from nemo_opd.cli.settings_command import SettingsCommand
from nemo_opd.config.run import RunConfig
from nemo_opd.logging.busy import loading
from nemo_opd.training.inputs import check_inputs


def distil(config: RunConfig) -> None:
    check_inputs(config, on_policy=True)
    # Imported after the checks: PyTorch takes seconds.
    with loading("PyTorch"):
        from nemo_opd.training.on_policy import distil

    distil(config)


COMMAND = SettingsCommand(RunConfig, lambda _: "on_policy_demo", distil)
