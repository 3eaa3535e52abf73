"""Model card of an export: facts about its weights from the chain."""

from collections import Counter
from collections.abc import Iterable

from dilocox.protocol.consensus.chain import taken
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import parameter_count, trained_count
from dilocox.protocol.wire.messages import Statement

__all__ = ["model_card"]

LOSSES_SHOWN = 5
CONTRIBUTORS_SHOWN = 100
QWEN2 = (
    "Load it with `PreTrainedTokenizerFast.from_pretrained`. For this family `AutoTokenizer` of transformers 5 normalizes and",
    "splits text as Qwen2's tokenizer does, despite `tokenizer.json`.",
)


def model_card(manifest: Manifest, commits: Iterable[Statement[pb.Commit]], round: int) -> str:
    """Return README.md for the state before a round. `commits`: verified commits of the run's chain, up to the one that
    names the state."""
    tokens: Counter[str] = Counter()
    losses: list[tuple[int, float]] = []
    trained, root = 0, b""
    for commit in commits:
        body = commit.body
        if body.evaluated and body.round <= round:
            losses.append((body.round, body.evaluation_loss))
        if body.round == round:
            root = body.state
        elif body.round < round:
            trained = body.trained
            tokens.update({item.cluster: item.weight for item in taken(body)})
    facts = {
        "run": f"`{manifest.run_id.hex()}`",
        "parameters": f"{parameter_count(manifest.model):,}, family {manifest.model.config.model_type}",
        "initial state": _origin(manifest),
        "data": f"{manifest.data.name}, corpus `{manifest.data.digest}`",
        "rounds": f"{trained:,} of {manifest.rounds.count:,} that were counted, {tokens.total():,} tokens",
        "state root": f"`{root.hex()}`",
    }
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [dilocox]",
        "---",
        "",
        f"# {manifest.run.name}",
        "",
        "Trained over the internet by the contributors below, with dilocox (DiLoCoX, arXiv 2506.21263).",
        "The run's signed commits prove each contribution; run `dilocox verify` to recheck them.",
        "",
        *_table(("", ""), list(facts.items())),
    ]
    if losses:
        rows = [(f"{number:,}", f"{loss:.4f}") for number, loss in losses[-LOSSES_SHOWN:]]
        lines += ["", "## Held-out loss", "", *_table(("before round", "nats per token"), rows)]
    if tokens:
        shown = tokens.most_common(CONTRIBUTORS_SHOWN)
        rows = [(f"`{cluster}`", f"{count:,}") for cluster, count in shown]
        lines += ["", "## Contributors", "", *_table(("cluster", "tokens counted"), rows)]
        if len(tokens) > len(shown):
            rest = tokens.total() - sum(count for _, count in shown)
            lines += ["", f"And {len(tokens) - len(shown):,} more, with {rest:,} tokens."]
    if manifest.model.config.model_type == "qwen2":
        lines += ["", "## Its tokenizer", "", *QWEN2]
    return "\n".join(lines) + "\n"


def _origin(manifest: Manifest) -> str:
    model = manifest.model
    if model.lora is not None:
        adapters = f"{trained_count(model):,} parameters of adapters of rank {model.lora.rank}, alpha {model.lora.alpha:g}"
        return f"imported weights `{model.lora.base}`, frozen, with {adapters}"
    return f"imported weights, state root `{model.initial}`" if model.initial else "random weights"


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ("---", "---"), *rows)]
