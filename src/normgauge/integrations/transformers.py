"""`ng.Monitor` in Hugging Face's Trainer."""

from typing import Any

from transformers import TrainerCallback

from normgauge.monitor import Monitor


class NormgaugeCallback(TrainerCallback):
    """Watches a `Trainer`: `Trainer(..., callbacks=[NormgaugeCallback(every=50, sinks=["run"])])`.

    Settings are those of `ng.Monitor`, without model and optimizer; `.monitor` is there from the first step on.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings, self.monitor = settings, None  # type: tuple[dict[str, Any], Monitor | None]

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Attach to the model and the optimizer the Trainer made."""
        optimizer = getattr(given["optimizer"], "optimizer", given["optimizer"])  # accelerate wraps it
        self.monitor = Monitor(given["model"], optimizer, **self.settings).start()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Tell the monitor that a step is over, with the loss last logged."""
        assert self.monitor is not None  # begun before
        logged = next((entry["loss"] for entry in reversed(state.log_history) if "loss" in entry), None)
        self.monitor.step(logged)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Detach."""
        if self.monitor is not None:
            self.monitor.close()
