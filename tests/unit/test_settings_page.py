"""docs/settings.md and the settings classes say the same."""

from pathlib import Path

import pytest

from jobs import model_settings, settings, settings_page

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_page_is_in_step_with_the_settings() -> None:
    assert PAGE.read_text() == settings_page.page(), "run: python -m jobs.settings_page > docs/settings.md"


@pytest.mark.parametrize("model", [settings.Settings, model_settings.ModelSettings])
def test_every_setting_is_explained(model: type[settings.Settings]) -> None:
    assert [name for name, field in model.model_fields.items() if not field.description] == []
