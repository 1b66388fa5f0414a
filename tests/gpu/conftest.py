"""What the tests of the engine on a GPU share with those on a CPU."""

from tests.unit.engine.conftest import tiny_loaded, tiny_path

__all__ = ["tiny_loaded", "tiny_path"]
