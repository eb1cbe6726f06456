"""Blocks whose keys are known by the tokens before them, so that a sequence with the same prefix need not compute them.

The keys of a block depend on its own tokens and on all before them. So cached blocks form a trie: a node is one full
logical block, and the way to it from the root spells the prefix. A look-up compares the tokens themselves, not a hash
of them; what it finds is right::

    root --[5 7 1 2]--> block 4 --[9 9 3 1]--> block 5
                                \\-[8 8 8 8]--> block 9

Blocks of sequences that have ended stay, idle, until their room is needed; the least recently used go first, the end of
a prefix before its start.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from megatron_dcp.cache.blocks import BlockPool

ReadTokens = Callable[[int, int], Sequence[int]]
"""``read(start, stop)``: the tokens of a sequence at these global positions."""


@dataclass(slots=True, eq=False)
class _Node:
    """One full block after a given prefix; the root is no block."""

    parent: _Node | None = None
    key: bytes = b""
    block: int = -1
    children: dict[bytes, _Node] = field(default_factory=dict)


class PrefixCache:
    """A block pool that remembers what is in its full blocks.

    Two sequences may compute the same block at the same time. The first of them is cached; the chain of the other goes
    on below that one, and its own copy stays its own. Therefore a node may be idle while a block below it is held.

    Args:
        pool: Its tables may be read; its blocks are reserved and freed through this class.
        block_tokens: Tokens of a logical block.
        enabled: Otherwise nothing is ever found.
    """

    def __init__(self, pool: BlockPool, block_tokens: int, *, enabled: bool = True) -> None:
        self.pool = pool
        self.block_tokens = block_tokens
        self.enabled = enabled
        # Evicting a few at a time leaves free blocks in runs, which a growing sequence then gets.
        self._evict_at_once = max(1, pool.num_blocks // 16)
        self._root = _Node()
        self._nodes: dict[int, _Node] = {}  # by block
        self._idle: dict[int, None] = {}  # blocks of nodes that no sequence holds, least recently used first
        self._ends: dict[Hashable, tuple[_Node, int]] = {}  # of each sequence's chain, and the chain's length

    @property
    def num_available(self) -> int:
        """Blocks that can be reserved: free, or cached and held by nobody."""
        return self.pool.num_free + len(self._idle)

    @property
    def num_cached(self) -> int:
        """Blocks that could be found, held or idle."""
        return len(self._nodes)

    def is_idle(self, block: int) -> bool:
        """Whether the block is cached and held by nobody."""
        return block in self._idle

    def match(self, read: ReadTokens, limit: int, salt: str = "") -> list[int]:
        """Cached blocks of the longest known prefix of at most ``limit`` tokens, of sequences with the same salt."""
        node, blocks, size = self._root, [], self.block_tokens
        for start in range(0, limit - size + 1, size):
            if not node.children or (child := node.children.get(_key(read(start, start + size), start, salt))) is None:
                break
            node = child
            blocks.append(node.block)
        return blocks

    def start(self, seq: Hashable, blocks: Sequence[int]) -> None:
        """Make a new sequence that begins with blocks from ``match`` (perhaps none)."""
        self.pool.share(seq, blocks)
        for block in blocks:
            self._idle.pop(block, None)
        self._ends[seq] = (self._nodes[blocks[-1]] if blocks else self._root, len(blocks))

    def reserve(self, seq: Hashable, num_blocks: int) -> None:
        """As ``BlockPool.reserve``; idle blocks are evicted if need be, and if that is enough."""
        missing = self.pool.missing(seq, num_blocks)
        if self.pool.num_free < missing <= self.num_available:
            wanted = max(missing, self._evict_at_once)
            while self._idle and self.pool.num_free < wanted:
                self._evict(next(iter(self._idle)))
        self.pool.reserve(seq, num_blocks)

    def extend(self, seq: Hashable, read: ReadTokens, num_computed: int, salt: str = "") -> None:
        """Take note that the first ``num_computed`` tokens of a sequence are computed: its full blocks can be found."""
        node, length = self._ends[seq]
        size = self.block_tokens
        if not self.enabled or num_computed < (length + 1) * size or not self._is_known(node):
            return
        table = self.pool.table(seq)
        for i in range(length, num_computed // size):
            key = _key(read(i * size, (i + 1) * size), i, salt)
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = self._nodes[table[i]] = _Node(node, key, table[i])
                self.pool.keep(table[i])
            node = child
        self._ends[seq] = (node, num_computed // size)

    def free(self, seq: Hashable) -> None:
        """Forget a sequence. Its cached blocks become the most recently used ones, the start of it last."""
        self.pool.free(seq)
        node: _Node | None = self._ends.pop(seq)[0]
        while node is not None and node.parent is not None:
            if self._is_known(node) and not self.pool.holders(node.block):
                self._idle.pop(node.block, None)
                self._idle[node.block] = None
            node = node.parent

    def clear(self) -> None:
        """Forget what is in the blocks: nothing computed so far is found again. No sequence may be live."""
        assert not self._ends, f"sequences {sorted(map(str, self._ends))} are live"
        for block in self._nodes:
            self.pool.drop(block)
        self._nodes.clear()
        self._idle.clear()
        self._root = _Node()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if pool, trie and idle blocks do not agree."""
        self.pool.check_integrity()
        if self._ends.keys() != set(self.pool.sequences):
            raise AssertionError(f"chains of {sorted(self._ends, key=str)}, but blocks of {self.pool.sequences}")
        found, stack = {}, [self._root]
        while stack:
            for key, child in (node := stack.pop()).children.items():
                if child.parent is not node or child.key != key or child.block in found:
                    raise AssertionError(f"block {child.block} is out of place")
                found[child.block] = child
                stack.append(child)
        if found != self._nodes or set(found) != self.pool.kept:
            raise AssertionError(f"blocks {sorted(found)} in the trie, {sorted(self.pool.kept)} kept")
        idle = {block for block in found if not self.pool.holders(block)}
        if idle != self._idle.keys():
            raise AssertionError(f"blocks {sorted(idle)} are idle, but {sorted(self._idle)} are listed")
        place = {block: i for i, block in enumerate(self._idle)}
        for block, i in place.items():
            parent = found[block].parent
            if parent is not None and place.get(parent.block, i) < i:
                raise AssertionError(f"block {parent.block} would be evicted before block {block} that follows it")

    def _is_known(self, node: _Node) -> bool:
        return node is self._root or self._nodes.get(node.block) is node

    def _evict(self, block: int) -> None:
        """Forget an idle block, and with it those below: they are held (idle ones went before), but cannot be found."""
        node = self._nodes[block]
        assert node.parent is not None
        del node.parent.children[node.key], self._idle[block]
        stack = [node]
        while stack:
            node = stack.pop()
            assert node.block not in self._idle, f"block {node.block} is idle, but follows one that is evicted"
            del self._nodes[node.block]
            self.pool.drop(node.block)
            stack.extend(node.children.values())


def _key(tokens: Sequence[int], start: int, salt: str) -> bytes:
    key = array("q", tokens).tobytes()
    return key if start or not salt else key + salt.encode("utf-8", "surrogatepass")
