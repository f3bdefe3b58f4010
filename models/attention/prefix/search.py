"""Build a prefix tree (trie) of documents, keeping the branches that save time.

A node is a run of tokens that the same documents share after the same prefix. Sorting puts documents with shared
prefixes next to each other, so one pass over neighbors builds the whole forest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from archon.models.attention.prefix.tree import MAX_TREE_TOKENS

NODE_TOKENS = 8
"""Cost of one more run, in tokens: one more attention call in every layer."""


class PrefixNode:
    """Tokens `low` to `high` (exclusive) of a document, and of all others that pass through the node.

    Attributes:
        document: index of the document with the computed tokens.
        parent: node of the tokens before; None at the start of documents.
        children: nodes of the tokens after, in the order of the sorted documents.
        ends: whether a document ends with the node.
    """

    def __init__(self, document: int, low: int, high: int, parent: PrefixNode | None) -> None:
        self.document, self.low, self.high, self.parent = document, low, high, parent
        self.children: list[PrefixNode] = []
        self.ends = False

    def walk(self) -> Iterator[PrefixNode]:
        """Yield this node and its descendants in depth-first preorder."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += reversed(node.children)

    def path(self) -> list[PrefixNode]:
        """Return the nodes from the root to this one."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]

    @property
    def tokens(self) -> int:
        """Tokens of this node and its descendants."""
        return sum(node.high - node.low for node in self.walk())

    @property
    def saved(self) -> int:
        """Tokens saved by computing this node once instead of once per branch."""
        return (self.high - self.low) * (len(self.children) + self.ends - 1)

    def dissolve(self) -> list[PrefixNode]:
        """Give each branch a copy of the tokens. Returns the nodes that replace this one."""
        branches, self.children = self.children, []
        for child in branches:
            child.low, child.parent = self.low, self.parent
        return [self, *branches] if self.ends else branches


class PrefixForest:
    """Shared prefixes of documents.

    Without `every_token` it omits the last token of a document, unless another document continues from it or it is the
    only one.

    Attributes:
        trees: roots of few tokens, each computed as one small document with a mask.
        roots: all other roots.
        end: last node of each document.
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
        """Number of nodes outside trees."""
        return sum(1 for root in self.roots for _ in root.walk())


def _calls(root: PrefixNode) -> int:
    """Return the number of separate runs that this root causes.

    Branches that would be small trees are cheap alone; after a shared prefix each of their runs is one more call.
    """
    length = root.high - root.low
    small = (child for child in root.children if child.tokens + length <= MAX_TREE_TOKENS)
    return 1 + sum(1 for child in small for _ in child.walk())


def _prune(root: PrefixNode) -> None:
    """Dissolve the descendants that save less than they cost."""
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
    """Return the roots, and the last node of each document."""
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
    """Remove the last token of leaves. Returns the new last node of each document."""
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
    """Cut a node in two and return the upper one; documents keep ending with the lower object."""
    upper = PrefixNode(node.document, node.low, at, node.parent)
    siblings = roots if node.parent is None else node.parent.children
    siblings[-1] = upper  # the cut node is on the last document's path
    upper.children = [node]
    node.low, node.parent = at, upper
    return upper


def _common_prefix_length(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length
