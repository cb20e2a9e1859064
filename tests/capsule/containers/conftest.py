"""A small image, and each runtime that there is with the image in its store: the shipped stand-ins always."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from coldsnap.capsule.containers.runtime import ContainerRuntime
from coldsnap.capsule.criu import Criu
from coldsnap.testing.containers import Image, open_runtime, published_image, runtime_names, with_image


@dataclass(frozen=True, kw_only=True)
class Shop:
    """A runtime that has the image."""

    runtime: ContainerRuntime
    image: Image


@pytest.fixture(scope="session")
def image(criu: Criu, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    with published_image(tmp_path_factory.mktemp("image")) as found:
        yield found


@pytest.fixture(scope="session", params=runtime_names())
def shop(request: pytest.FixtureRequest, image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("runtime")
    with open_runtime(request.param, folder) as runtime, with_image(runtime, image):
        yield Shop(runtime=runtime, image=image)
