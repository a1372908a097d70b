from __future__ import annotations

import pytest

from batchradix.checkpoint.known import KnownModel, known_models
from batchradix.checkpoint.listed import LISTED_MODELS
from batchradix.checkpoint.resolve import hub_name


@pytest.mark.parametrize("model", known_models(), ids=lambda model: model.name)
def test_a_known_models_numbers_add_up_to_what_its_makers_say(model: KnownModel) -> None:
    assert model.config.num_parameters == pytest.approx(1e9 * model.billion_parameters, rel=1e-3)
    assert hub_name(model.name).repo == model.name


def test_every_listed_model_is_known_by_its_name_on_the_hub() -> None:
    names = {model.name for model in known_models()}
    assert {listed.hub_name for listed in LISTED_MODELS.values()} <= names
