"""Stub until merged."""


class GrammarFailed(Exception):
    pass


class Constraint:
    def prepare(self) -> None: ...
    def restrict(self, logits: object) -> None: ...
    def take(self, token_id: int) -> bool:
        return False


class Grammars:
    def __init__(self, tokenizer: object, vocabulary: int, end_ids: frozenset[int]) -> None: ...
    def open(self, text: str) -> Constraint:
        raise GrammarFailed("no")
