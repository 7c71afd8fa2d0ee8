from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.client.fake_service import FakeService


@pytest.fixture
def fake() -> Iterator[FakeService]:
    service = FakeService()
    service.start()
    yield service
    service.close()
