"""Ask a hub whether it has a model and gives it to this user: one question, nothing is fetched."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CONFIG = "config.json"
"""The file that is asked for: a model without it is none that an engine can load."""


@dataclass(frozen=True)
class Answer:
    """What a hub said: it gives the model (or may, a little later), refuses it, or did not answer."""

    kind: Literal["given", "refused", "silent"]
    said: str = ""
    advice: str = ""


def ask(source: str, revision: str | None = None) -> Answer:
    """Ask for a model's config, as a worker would: with HF_TOKEN, HF_ENDPOINT, HF_HUB_ETAG_TIMEOUT."""
    import huggingface_hub  # a second, and it comes with what workers install
    from huggingface_hub import constants

    try:
        url = huggingface_hub.hf_hub_url(source, CONFIG, revision=revision)
        huggingface_hub.get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # of the library it is built on, too, and that has changed before
        return _answer(error, source, revision, constants.ENDPOINT)
    return Answer("given")


def cache() -> Path:
    """Return where what was fetched from a hub is kept."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _answer(error: Exception, source: str, revision: str | None, endpoint: str) -> Answer:
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    match error:
        case errors.GatedRepoError():
            why = "does not open it" if os.environ.get("HF_TOKEN") else "is not set"
            said = f"it is gated at {endpoint}, and HF_TOKEN {why}"
            return Answer("refused", said, f"Accept its terms at {endpoint}/{source}, and set HF_TOKEN.")
        case errors.RevisionNotFoundError():
            return Answer("refused", f"{endpoint} has no revision {revision!r} of it", "Correct 'revision'.")
        case errors.EntryNotFoundError():
            advice = f"If it has GGUF files, fetch one and give its path: hf download {source} FILE.gguf"
            return Answer("refused", f"it has no {CONFIG} at {endpoint}", advice)
        case errors.RepositoryNotFoundError():
            said = f"it is no directory here, and {endpoint} shows no model of this name"
            return Answer("refused", said, "Correct it; if it is private, set HF_TOKEN.")
        case errors.HfHubHTTPError() if status in (401, 403):
            return Answer("refused", f"{endpoint} refuses it ({status})", "Set HF_TOKEN to one that may.")
        case errors.HfHubHTTPError() if status is not None:  # busy, perhaps: a worker tries again
            return Answer("given")
        case errors.OfflineModeIsEnabled():
            return Answer("silent", "HF_HUB_OFFLINE is set", "Unset it, or give a directory.")
    reason = str(error).split("\n")[0] or type(error).__name__
    said = f"it is no directory here, and {endpoint} cannot be reached ({reason})"
    return Answer("silent", said, "Give a directory, or try again when there is a network.")
