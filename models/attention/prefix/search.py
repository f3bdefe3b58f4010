"""Finds what documents begin alike with, as a forest whose branches are worth their cost.

A node stands for a run of tokens that the same documents have after the same beginning. Sorting puts documents with
common beginnings next to each other, so that one pass over neighbors builds the whole forest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from archon.models.attention.prefix.tree import MAX_TREE_TOKENS

NODE_TOKENS = 8
"""What computing one more run of tokens costs, in tokens: its attention is one more call in every layer."""


class PrefixNode:
    """Tokens `low` to before `high` of a document, and of all others that pass through the node.

    Attributes:
        document: the index of the document whose tokens are computed.
        parent: the node of the tokens before; None where documents begin.
        children: the nodes of the tokens after, in the order of the sorted documents.
        ends: whether a document ends with the node.
    """

    def __init__(self, document: int, low: int, high: int, parent: PrefixNode | None) -> None:
        self.document, self.low, self.high, self.parent = document, low, high, parent
        self.children: list[PrefixNode] = []
        self.ends = False

    def walk(self) -> Iterator[PrefixNode]:
        """Yield this node and all below it, each before those below it, and a branch before the next one."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += reversed(node.children)

    def path(self) -> list[PrefixNode]:
        """Return the nodes from the first token to this one, which is last."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]

    @property
    def tokens(self) -> int:
        """The tokens of this node and all below it."""
        return sum(node.high - node.low for node in self.walk())

    @property
    def saved(self) -> int:
        """How many tokens more there are if each branch computes this node's tokens for itself."""
        return (self.high - self.low) * (len(self.children) + self.ends - 1)

    def dissolve(self) -> list[PrefixNode]:
        """Give each branch its own copy of the tokens. Returns the nodes that stand in this one's place."""
        branches, self.children = self.children, []
        for child in branches:
            child.low, child.parent = self.low, self.parent
        return [self, *branches] if self.ends else branches


class PrefixForest:
    """The common beginnings of documents.

    Without `every_token` the last token of a document is not in it, unless another document goes on from there, or it
    is the only one.

    Attributes:
        trees: roots of few tokens, which are computed as one small document with a mask.
        roots: the roots of all others.
        end: the node that each document ends with.
    """

    def __init__(self, documents: Sequence[np.ndarray], every_token: bool = True) -> None:
        waiting, self.end = _build_forest(documents)
        if not every_token:
            self.end = _drop_last_tokens(self.end)
        self.trees, self.roots = list[PrefixNode](), list[PrefixNode]()
        while waiting:
            root = waiting.pop()
            if root.tokens <= MAX_TREE_TOKENS:
                self.trees.append(root)
            elif root.children and root.saved < NODE_TOKENS * _calls(root):
                waiting += root.dissolve()
            else:
                _prune(root)
                self.roots.append(root)

    @property
    def nodes(self) -> int:
        """The number of nodes outside of trees."""
        return sum(1 for root in self.roots for _ in root.walk())


def _calls(root: PrefixNode) -> int:
    """Return how many runs are computed for themselves because of this root.

    Branches that would be trees of their own are cheap; after a beginning each run of theirs is one more call.
    """
    own = root.high - root.low
    small = (child for child in root.children if child.tokens + own <= MAX_TREE_TOKENS)
    return 1 + sum(1 for child in small for _ in child.walk())


def _prune(root: PrefixNode) -> None:
    """Dissolve the nodes below that save less than they cost."""
    for node in root.walk():
        kept, waiting = list[PrefixNode](), node.children[::-1]
        while waiting:
            child = waiting.pop()
            if child.children and child.saved < NODE_TOKENS:
                waiting += reversed(child.dissolve())
            else:
                kept.append(child)
        node.children = kept


def _build_forest(documents: Sequence[np.ndarray]) -> tuple[list[PrefixNode], list[PrefixNode]]:
    """Return the roots, and the node that each document ends with."""
    order = sorted(range(len(documents)), key=lambda i: documents[i].tobytes())
    roots, end, path = list[PrefixNode](), dict[int, PrefixNode](), list[PrefixNode]()
    common = [0, *(_common_prefix_length(documents[a], documents[b]) for a, b in pairwise(order))]
    for document, shared in zip(order, common, strict=True):
        while path and path[-1].low >= shared:
            path.pop()
        if path and path[-1].high > shared:
            path[-1] = _split(path[-1], shared, roots)
        if len(documents[document]) > shared:
            node = PrefixNode(document, shared, len(documents[document]), path[-1] if path else None)
            (path[-1].children if path else roots).append(node)
            path.append(node)
        path[-1].ends = True
        end[document] = path[-1]
    return roots, [end[document] for document in range(len(documents))]


def _drop_last_tokens(end: Sequence[PrefixNode]) -> list[PrefixNode]:
    """Take the last token from nodes that no other follows. Returns the nodes that documents end with then."""
    gone = set[PrefixNode]()
    for leaf in {node for node in end if not node.children}:
        if leaf.high - leaf.low > 1:
            leaf.high -= 1
        elif leaf.parent is not None:
            leaf.parent.children.remove(leaf)
            leaf.parent.ends = True
            gone.add(leaf)
    return [node.parent if node in gone and node.parent is not None else node for node in end]


def _split(node: PrefixNode, at: int, roots: list[PrefixNode]) -> PrefixNode:
    """Cut a node in two. Returns the upper one; the lower one stays the object that documents end with."""
    upper = PrefixNode(node.document, node.low, at, node.parent)
    siblings = roots if node.parent is None else node.parent.children
    siblings[-1] = upper  # a node that is cut is on the last document's path
    upper.children = [node]
    node.low, node.parent = at, upper
    return upper


def _common_prefix_length(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length
