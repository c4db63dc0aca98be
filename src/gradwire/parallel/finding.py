"""Which layers tensor parallel ranks can share, found in the model itself. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from gradwire.parallel import part_math, part_shapes
from gradwire.parallel.flow import Feed, called_once, feeds, trace
from gradwire.parallel.kinds import Choice, is_plain, linears_below, misfit
from gradwire.parallel.weights import read_elsewhere

HEAD_COUNTS = (
    "num_heads", "n_heads", "n_head", "nhead", "nheads", "heads", "num_attention_heads",
    "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads", "num_key_value_heads",
)  # fmt: skip
KNOWN_OPERATIONS = (part_math, part_shapes)  # what a piece of an activation can do stands in these
TORCHS_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def find(model: nn.Module, n: int) -> dict[str, Choice]:
    """A choice for every Linear, Embedding and attention of ``model``: n ranks share it, or why not."""
    finder = _Finder(dict(model.named_modules()), n)
    finder.attention()
    finder.pairs()
    finder.vocabularies()
    for name in linears_below("", finder.modules):
        finder.decide(
            name, "replicate", "no Linear was found that it feeds, or that feeds it, through work that ranks can share"
        )
    return finder.choices


class _Finder:
    """The first decision about a layer counts."""

    def __init__(self, modules: Mapping[str, nn.Module], n: int) -> None:
        self.modules, self.n = modules, n
        self.choices: dict[str, Choice] = {}
        for name in read_elsewhere(modules):
            self.decide(name, "replicate", "a forward reads its weight itself")

    def decide(self, name: str, rule: str, reason: str) -> None:
        self.choices.setdefault(name, Choice(name, rule, reason))

    def attention(self) -> None:
        """torch's own attention, and the MLPs of its layers."""
        for name, module in self.modules.items():
            if isinstance(module, nn.MultiheadAttention):
                if not is_plain(module, nn.MultiheadAttention):
                    self.decide(name, "replicate", "it has a forward of its own")
                elif module.num_heads % self.n:
                    self.decide(name, "replicate", f"{module.num_heads} heads are not divisible by {self.n}")
                else:
                    self.decide(name, "heads", f"{module.num_heads // self.n} of {module.num_heads} heads a rank")
            elif isinstance(module, TORCHS_LAYERS):
                prefix = f"{name}." if name else ""
                self.pair(Feed(f"{prefix}linear2", (f"{prefix}linear1",), heads=False), module)

    def pairs(self) -> None:
        """Linears that follow each other in a block's forward, the innermost blocks first."""
        for name, module in reversed(list(self.modules.items())):
            linears = linears_below(name, self.modules)
            if len(linears.keys() - self.choices.keys()) < 2 or isinstance(module, TORCHS_LAYERS):
                continue
            if (graph := trace(module)) is None:
                continue
            prefix = f"{name}." if name else ""
            once = called_once(graph)
            inside = {inner.removeprefix(prefix): linear for inner, linear in linears.items()}
            for feed in feeds(graph, inside, dict(module.named_modules())):
                if once.issuperset((*feed.sources, feed.to)):
                    self.pair(
                        Feed(prefix + feed.to, tuple(prefix + source for source in feed.sources), feed.heads), module
                    )

    def pair(self, feed: Feed, block: nn.Module) -> None:
        """Sources by columns, their target by rows, if they are free for it, and sizes and heads allow."""
        linears = linears_below("", self.modules)
        if not linears.keys() >= {feed.to, *feed.sources} or feed.to in self.choices:
            return
        if any(self.choices[source].rule != "column" for source in feed.sources if source in self.choices):
            return
        sizes = {source: linears[source].out_features for source in feed.sources} | {
            feed.to: linears[feed.to].in_features
        }
        reasons = [
            f"{name}: {size} features are not divisible by {self.n}" for name, size in sizes.items() if size % self.n
        ]
        for key in HEAD_COUNTS if feed.heads else ():
            count: object = getattr(block, key, None)
            if isinstance(count, int) and count % self.n:
                reasons.append(f"{key}={count} is not divisible by {self.n}")
        for source in feed.sources:
            self.decide(source, *(("replicate", reasons[0]) if reasons else ("column", f"feeds {feed.to}")))
        self.decide(feed.to, *(("replicate", reasons[0]) if reasons else ("row", f"fed by {', '.join(feed.sources)}")))

    def vocabularies(self) -> None:
        """Embeddings, and output heads: tied to an embedding, or the last Linear and much wider than what it reads."""
        tables = {
            id(module.weight): name
            for name, module in self.modules.items()
            if isinstance(module, nn.Embedding) and is_plain(module, nn.Embedding)
        }
        linears = linears_below("", self.modules)
        last = list(linears)[-1:]
        for name, module in self.modules.items():
            if name in linears and id(linears[name].weight) in tables:
                why = f"output head, tied to {tables[id(linears[name].weight)]}"
            elif name in last and linears[name].out_features >= 2 * linears[name].in_features:
                why = "output head"
            elif isinstance(module, nn.Embedding):
                why = f"table of {module.num_embeddings} rows"
            else:
                continue
            problem = misfit(name, self.modules, "vocabulary", self.n)
            self.decide(name, *(("replicate", problem) if problem else ("vocabulary", why)))
