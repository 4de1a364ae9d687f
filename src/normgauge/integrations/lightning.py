"""`ng.Monitor` in Lightning."""

from typing import Any

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    from pytorch_lightning.callbacks import Callback

from normgauge.monitor import Monitor


class NormgaugeCallback(Callback):  # type: ignore[misc,unused-ignore]
    """Watches a fit: `Trainer(callbacks=[NormgaugeCallback(every=50, sinks=["run"])])`.

    Settings are those of `ng.Monitor`, without model and optimizer; `.monitor` is there from the start of training on.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings, self.monitor = settings, None  # type: tuple[dict[str, Any], Monitor | None]
        self._state: dict[str, Any] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the module and its optimizers."""
        optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in trainer.optimizers]
        self.monitor = Monitor(pl_module, optimizers, **self.settings).start()
        if self._state is not None:
            self.monitor.load_state_dict(self._state)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Look at the step from outside: it may call parts of the module one by one."""
        if self.monitor is not None:
            self.monitor.open_look()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """End the look."""
        if self.monitor is not None:
            self.monitor.close_look()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Tell the monitor that a step is over."""
        assert self.monitor is not None  # begun before
        self.monitor.step(outputs["loss"] if isinstance(outputs, dict) else outputs)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Detach, also after an exception."""
        if self.monitor is not None:
            self.monitor.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the monitor's state for the checkpoint."""
        return {} if self.monitor is None else self.monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts."""
        self._state = state_dict or None
