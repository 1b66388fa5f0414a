import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from transformers import PreTrainedTokenizerFast

from tests.unit import tokenizers_zoo as zoo
from worker import token_bytes
from worker.token_text import TokenText

MEASURES = {kind: TokenText(make()) for kind, make in zoo.KINDS.items()}


def _ids(kind: str) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, zoo.KINDS[kind]().get_vocab_size() - 1), max_size=12)


@pytest.mark.parametrize("kind", zoo.EXACT)
def test_the_decoder_of_a_tokenizer_is_read(kind: str) -> None:
    assert MEASURES[kind]._decoder is not None


@pytest.mark.parametrize("kind", zoo.KINDS)
@given(st.data())
def test_any_tokens_measure_as_their_tokenizer_decodes_them(kind: str, data: st.DataObject) -> None:
    ids = data.draw(_ids(kind))
    measured = MEASURES[kind].measure(ids)
    assert measured.text == zoo.KINDS[kind]().decode(ids, skip_special_tokens=True)
    assert len(measured.pieces) == len(ids)
    assert measured.starts == sorted(measured.starts)
    assert (measured.starts[0], measured.starts[-1]) == (0, len(measured.text))
    assert measured.before(len(measured.text)) == [at for at, piece in enumerate(measured.pieces) if piece]


def test_a_space_before_bytes_of_no_text_is_one_of_these() -> None:
    ids = [32, 128]  # the bytes 0x20 and 0x80
    assert MEASURES["sentencepiece"].measure(ids).text == "\ufffd\ufffd"
    assert zoo.KINDS["sentencepiece"]().decode(ids) == "\ufffd\ufffd"


@pytest.mark.parametrize("kind", zoo.KINDS)
@given(st.data())
def test_the_bytes_of_tokens_join_to_their_text(kind: str, data: st.DataObject) -> None:
    ids = data.draw(_ids(kind))
    measured = MEASURES[kind].measure(ids)
    joined = b"".join(measured.pieces)
    if "\ufffd" not in measured.text:
        assert joined.decode() == measured.text
        for piece, start, end in zip(measured.pieces, measured.starts, measured.starts[1:], strict=False):
            within = measured.text[start : end + 1].encode()
            assert piece in within or not piece
    elif "sentencepiece" not in kind:
        assert joined.decode(errors="replace") == measured.text


@given(st.text(max_size=30))
def test_a_text_that_was_encoded_comes_back_character_by_character(text: str) -> None:
    tokenizer = zoo.byte_level()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    measured = TokenText(tokenizer).measure(ids, shown=range(tokenizer.get_vocab_size()))
    assert measured.text == text
    assert b"".join(measured.pieces) == text.encode()


def test_a_character_of_several_tokens_begins_with_the_first_of_them() -> None:
    tokenizer = zoo.sentence_piece()
    ids = [tokenizer.token_to_id(name) for name in ("▁Hello", "▁", "<0xE6>", "<0x9D>", "<0xB1>", "lo")]
    measured = TokenText(tokenizer).measure(ids)
    assert measured.text == "Hello 東lo"
    assert measured.pieces == [b"Hello", b" ", b"\xe6", b"\x9d", b"\xb1", b"lo"]
    assert measured.starts == [0, 5, 6, 6, 6, 7, 9]
    assert measured.before(7) == [0, 1, 2, 3, 4]


def test_special_tokens_are_hidden_unless_they_are_asked_for() -> None:
    tokenizer = zoo.byte_level()
    texts = TokenText(tokenizer)
    end, call = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<tool_call>")
    ids = [call, *tokenizer.encode("Hi").ids, end]
    assert texts.measure(ids).text == "<tool_call>Hi"
    assert texts.measure(ids).pieces[-1] == b""
    assert texts.measure(ids, shown=[end]).text == "<tool_call>Hi<|im_end|>"
    assert texts.piece(end) == b"<|im_end|>"


def test_what_continues_a_text_keeps_its_leading_space() -> None:
    for tokenizer in (zoo.sentence_piece(), zoo.metaspace()):
        texts, ids = TokenText(tokenizer), [tokenizer.token_to_id("▁Hello")]
        assert texts.measure(ids).text == "Hello"
        assert texts.measure(ids, continues=True).text == " Hello"
        assert (texts.first_piece(ids[0]), texts.piece(ids[0])) == (b"Hello", b" Hello")


def test_ids_beyond_the_vocabulary_stand_for_nothing() -> None:
    texts = TokenText(zoo.byte_level())
    assert texts.piece(10**6) == b""


def test_a_tokenizer_of_transformers_measures_like_its_backend() -> None:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=zoo.byte_level(), eos_token="<|im_end|>")
    ids = zoo.byte_level().encode("größer 東京<|im_end|>").ids
    assert TokenText(wrapped).measure(ids) == MEASURES["byte-level"].measure(ids)
    assert TokenText(wrapped).measure(ids).text == "größer 東京"


def test_a_decoder_that_does_more_than_it_shows_is_not_trusted() -> None:
    class Louder(PreTrainedTokenizerFast):
        def _decode(self, *args: object, **options: object) -> str:
            return super()._decode(*args, **options).upper()

    texts = TokenText(Louder(tokenizer_object=zoo.byte_level()))
    assert texts._decoder is None
    assert texts.measure(zoo.byte_level().encode("hello").ids).text == "HELLO"


def test_unknown_decoders_are_not_guessed() -> None:
    tokenizer = Tokenizer.from_str(zoo.sentence_piece().to_str())
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()])
    assert token_bytes.read(tokenizer) is None
