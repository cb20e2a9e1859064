"""Which driver features this machine really has, each proved by doing it.

``ladder.py`` lists them. A pass is remembered, bound to what it depends on; a proof takes from a third of a second (a
round trip through CRIU) to some seconds (one with CUDA state), and runs in child processes that end with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from coldsnap.capsule.checks import check_root
from coldsnap.capsule.criu import Criu, find_criu
from coldsnap.capsule.cuda.accelerator import Accelerator, nvidia
from coldsnap.capsule.hostfacts import nvidia_driver
from coldsnap.capsule.probes.bench import Bench
from coldsnap.capsule.probes.ladder import FEATURES, PROCESS_TREE, Feature
from coldsnap.capsule.probes.remembered import CACHE_NAME, Ground, Passes, ground_of
from coldsnap.core.drivers import FeatureResult, FeatureState
from coldsnap.errors import ColdsnapError, MissingCapability

__all__ = ["CACHE_NAME", "PROCESS_TREE", "probe_features"]


def probe_features(
    features: Iterable[str],
    *,
    cache_dir: Path | None = None,
    find: Callable[[], Criu] = find_criu,
    accelerator: Accelerator | None = None,
    driver: Callable[[], str | None] = nvidia_driver,
) -> tuple[FeatureResult, ...]:
    """One result for each feature, in the order asked. ``cache_dir`` is a private folder; None remembers nothing."""
    prober = _Prober(Passes(cache_dir), find, accelerator or nvidia(cache_dir=cache_dir), driver)
    return tuple(prober.result(name) for name in features)


class _Prober:
    """One round of probing: what was found about a feature holds for those that need it."""

    def __init__(
        self,
        passes: Passes,
        find: Callable[[], Criu],
        accelerator: Accelerator,
        driver: Callable[[], str | None],
    ) -> None:
        self._passes = passes
        self._find = find
        self._accelerator = accelerator
        self._driver = driver
        self._results: dict[str, FeatureResult] = {}

    def result(self, name: str) -> FeatureResult:
        """The feature's result, found at most once."""
        if name not in self._results:
            state, reason = self._find_out(name)
            self._results[name] = FeatureResult(feature=name, state=state, reason=reason)
        return self._results[name]

    def _find_out(self, name: str) -> tuple[FeatureState, str]:
        feature = FEATURES.get(name)
        if feature is None:
            return FeatureState.UNQUALIFIED, "this version of coldsnap knows no such feature and has no probe for it"
        driver = self._driver() if feature.needs_gpu else None
        if feature.needs_gpu and driver is None:
            return FeatureState.UNSUPPORTED, "this machine has no NVIDIA driver"
        if feature.prove is None:
            return FeatureState.UNQUALIFIED, feature.unproved
        try:
            ground, bench = self._stand(feature, driver)
            known = self._passes.reason(name, ground)
            if known is not None:
                return FeatureState.PASSED, f"{known} earlier in this boot"
            for need in feature.needs:
                below = self.result(need)
                if below.state is not FeatureState.PASSED:
                    return below.state, f"needs {need}, which is {below.state.value}: {below.reason}"
            reason = feature.prove(bench)
        except MissingCapability as error:
            return FeatureState.UNSUPPORTED, str(error)
        except ColdsnapError as error:
            return FeatureState.FAILED, str(error)
        self._passes.remember(name, ground, reason)
        return FeatureState.PASSED, reason

    def _stand(self, feature: Feature, driver: str | None) -> tuple[Ground, Bench]:
        """What the feature's proof will depend on, and what it works with. Raises MissingCapability."""
        check_root()
        uses_criu = PROCESS_TREE in (feature.name, *_below(feature))
        criu = self._find() if uses_criu else None
        if not feature.needs_gpu:
            return ground_of(criu), Bench(find=self._find)
        inventory = self._accelerator.inventory()
        if not inventory.gpus:
            raise MissingCapability(
                f"CUDA finds no device: {inventory.why_not}", cure="check the driver with nvidia-smi"
            )
        bench = Bench(
            find=self._find,
            environment=self._accelerator.environment,
            device_paths=self._accelerator.device_paths,
            gpu=inventory.gpus[0],
        )
        gpus = tuple(gpu.uuid for gpu in inventory.gpus)
        return ground_of(criu, nvidia_driver=driver, gpus=gpus), bench


def _below(feature: Feature) -> tuple[str, ...]:
    """Every feature that this one stands on."""
    return tuple(name for need in feature.needs for name in (need, *_below(FEATURES[need])))
