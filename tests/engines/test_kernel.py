"""What an engine process asks of libraries around a freeze."""

from __future__ import annotations

from coldsnap.engines.kernel import close_nvml


class Nvml:
    """NVML as it counts: an error once it is not open any more."""

    def __init__(self, openings: int) -> None:
        self.left = openings

    def nvmlShutdown(self) -> int:  # noqa: N802 - its name
        if self.left == 0:
            return 1  # NVML_ERROR_UNINITIALIZED
        self.left -= 1
        return 0


def test_nvml_is_closed_as_often_as_it_was_opened() -> None:
    library = Nvml(3)
    assert close_nvml(lambda: library) == 3
    assert library.left == 0
    assert close_nvml(lambda: library) == 0


def test_a_process_without_it_does_not_load_it() -> None:
    assert close_nvml(lambda: None) == 0
    assert close_nvml() == 0
