"""What all tests share: property-test profiles, and reasons to skip what this machine cannot do."""

from __future__ import annotations

import importlib.util

import hypothesis
import pytest

# No deadlines: the machines are small and shared, and a slow example is no bug. `ci` always tries the
# same examples, so that a commit passes or fails for its own sake; `fuzz` looks for new ones.
_base = hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.register_profile("dev", _base, max_examples=20)
hypothesis.settings.register_profile("ci", _base, max_examples=200, derandomize=True)
hypothesis.settings.register_profile("fuzz", _base, max_examples=5_000)
hypothesis.settings.load_profile("dev")


#: marker -> (libraries that its tests need, who brings them)
_NEEDS = {
    "engine": (("torch", "transformers"), "the demo extra"),
    "vllm": (("vllm", "torch", "transformers"), "vLLM"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for marker, (libraries, bringer) in _NEEDS.items():
        missing = [name for name in libraries if importlib.util.find_spec(name) is None]
        if not missing:
            continue
        skip = pytest.mark.skip(reason=f"needs {bringer}; not installed: {', '.join(missing)}")
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(skip)
