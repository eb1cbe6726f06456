"""Blocks whose keys are known by the tokens before them, so that a sequence with the same prefix need not compute them.

The keys of a block depend on its own tokens and on all before them. So cached blocks form a trie: a node is one full
logical block, and the way to it from the root spells the prefix. A look-up compares the tokens themselves, not a hash
of them; what it finds is right::

    root --[5 7 1 2]--> block 4 --[9 9 3 1]--> block 5
                                \\-[8 8 8 8]--> block 9

Blocks of sequences that have ended stay, idle, until their room is needed; the least recently used go first, the end of
a prefix before its start.

Layers with a sliding window have a pool of their own (`WindowPool`). A node then stands for a block in either, but may
have lost the second one, which no sequence needs for long: a prefix can be reused where the blocks are left that its
next token sees through the window.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from megatron_dcp.cache.blocks import RELEASED, BlockPool
from megatron_dcp.cache.layout import window_start

ReadTokens = Callable[[int, int], Sequence[int]]
"""``read(start, stop)``: the tokens of a sequence at these global positions."""


@dataclass(slots=True, eq=False)
class _Node:
    """One full block after a given prefix; the root is no block."""

    parent: _Node | None = None
    key: bytes = b""
    block: int = -1
    in_window: int = RELEASED
    children: dict[bytes, _Node] = field(default_factory=dict)


class WindowPool:
    """Blocks of the layers with a sliding window: what the next query of each sequence sees, and known ones until then.

    A sequence's table has an entry for each of its logical blocks; those before the window are `RELEASED`. So both
    tables grow by the same number of blocks.

    Args:
        num_blocks: Physical blocks on every rank.
        tokens: Keys that a query sees, its own one among them.
        block_tokens: Tokens of a logical block.
    """

    def __init__(self, num_blocks: int, tokens: int, block_tokens: int) -> None:
        self.pool = BlockPool(num_blocks, tokens_per_block=block_tokens)
        self._tokens = tokens
        self._block_tokens = block_tokens
        self._nodes: dict[int, _Node] = {}  # by block
        self._idle: dict[int, None] = {}  # blocks of nodes that no sequence holds, least recently used first

    @property
    def num_available(self) -> int:
        """Blocks that can be reserved: free, or cached and held by nobody."""
        return self.pool.num_free + len(self._idle)

    def num_idle(self, nodes: Sequence[_Node]) -> int:
        """Blocks that nobody holds, of those that a sequence would hold if it began with these nodes."""
        first = self.first_block(len(nodes) * self._block_tokens)
        return sum(node.in_window in self._idle for node in nodes[first:])

    def first_block(self, num_computed: int) -> int:
        """Entry of the table from which on the token after the first ``num_computed`` sees keys."""
        return window_start(num_computed, self._tokens) // self._block_tokens

    def start(self, seq: Hashable, nodes: Sequence[_Node]) -> None:
        """Make a new sequence that begins with the blocks of these nodes."""
        first = self.first_block(len(nodes) * self._block_tokens)
        blocks = [RELEASED] * first + [node.in_window for node in nodes[first:]]
        assert RELEASED not in blocks[first:], f"blocks {blocks} from {first} on"
        self.pool.share(seq, blocks)
        for block in blocks[first:]:
            self._idle.pop(block, None)

    def reserve(self, seq: Hashable, num_blocks: int) -> None:
        """As ``BlockPool.reserve``; idle blocks are forgotten if need be, and if that is enough."""
        missing = self.pool.missing(seq, num_blocks)
        while self.pool.num_free < missing <= self.num_available:
            self.forget(self._nodes[next(iter(self._idle))])
        self.pool.reserve(seq, num_blocks)

    def know(self, node: _Node, block: int) -> None:
        """Let a block that a sequence holds be found by its node, unless that has one or the block is released."""
        if node.in_window == RELEASED != block:
            node.in_window = block
            self._nodes[block] = node
            self.pool.keep(block)

    def slide(self, seq: Hashable, num_computed: int) -> None:
        """Release what is before the window of a sequence's next token."""
        self._rest(self.pool.release(seq, min(self.first_block(num_computed), len(self.pool.table(seq)))))

    def free(self, seq: Hashable) -> None:
        """Forget a sequence."""
        table = list(self.pool.table(seq))
        self.pool.free(seq)
        self._rest(block for block in reversed(table) if block != RELEASED)

    def forget(self, node: _Node) -> None:
        """Let the node's block, if it has one, be found no more."""
        if node.in_window != RELEASED:
            del self._nodes[node.in_window]
            self._idle.pop(node.in_window, None)
            self.pool.drop(node.in_window)
            node.in_window = RELEASED

    def check_integrity(self, nodes: Iterable[_Node]) -> None:
        """Raise ``AssertionError`` if pool, nodes and idle blocks do not agree."""
        self.pool.check_integrity()
        known = {node.in_window: node for node in nodes if node.in_window != RELEASED}
        if known != self._nodes or set(known) != self.pool.kept:
            raise AssertionError(f"window blocks {sorted(known)} of nodes, {sorted(self.pool.kept)} kept")
        idle = {block for block in known if not self.pool.holders(block)}
        if idle != self._idle.keys():
            raise AssertionError(f"window blocks {sorted(idle)} are idle, but {sorted(self._idle)} are listed")

    def _rest(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block in self._nodes and not self.pool.holders(block):
                self._idle[block] = None


class PrefixCache:
    """A block pool that remembers what is in its full blocks.

    Two sequences may compute the same block at the same time. The first of them is cached; the chain of the other goes
    on below that one, and its own copy stays its own. Therefore a node may be idle while a block below it is held.

    Args:
        pool: Its tables may be read; its blocks are reserved and freed through this class.
        block_tokens: Tokens of a logical block.
        enabled: Otherwise nothing is ever found.
        window: Of a model that has layers with a sliding window.
    """

    def __init__(
        self, pool: BlockPool, block_tokens: int, *, enabled: bool = True, window: WindowPool | None = None
    ) -> None:
        self.pool = pool
        self.window = window
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
        """Blocks that can be reserved: free, or cached and held by nobody; in both pools."""
        return self._available if self.window is None else min(self._available, self.window.num_available)

    @property
    def num_held(self) -> int:
        """Blocks that sequences hold."""
        return self.pool.num_blocks - self._available

    @property
    def _available(self) -> int:
        return self.pool.num_free + len(self._idle)

    @property
    def num_cached(self) -> int:
        """Blocks that could be found, held or idle."""
        return len(self._nodes)

    def left_after(self, blocks: Sequence[int], further: int) -> int:
        """Blocks that could be reserved after a sequence has begun with blocks of ``match`` and taken ``further``."""
        left = self._available - sum(block in self._idle for block in blocks)
        if self.window is not None:
            nodes = [self._nodes[block] for block in blocks]
            left = min(left, self.window.num_available - self.window.num_idle(nodes))
        return left - further

    def match(self, read: ReadTokens, limit: int, salt: str = "") -> list[int]:
        """Cached blocks of the longest known prefix of at most ``limit`` tokens, of sequences with the same salt."""
        node, blocks, size = self._root, [], self.block_tokens
        usable = whole = 0  # blocks of a prefix that can be reused; blocks before the last run with those of the window
        for start in range(0, limit - size + 1, size):
            if not node.children or (child := node.children.get(_key(read(start, start + size), start, salt))) is None:
                break
            node = child
            blocks.append(node.block)
            if self.window is not None:
                if node.in_window == RELEASED:
                    whole = len(blocks)
                if self.window.first_block(start + size) < whole:
                    continue
            usable = len(blocks)
        return blocks[:usable]

    def start(self, seq: Hashable, blocks: Sequence[int]) -> None:
        """Make a new sequence that begins with blocks from ``match`` (perhaps none)."""
        self.pool.share(seq, blocks)
        for block in blocks:
            self._idle.pop(block, None)
        if self.window is not None:
            self.window.start(seq, [self._nodes[block] for block in blocks])
        self._ends[seq] = (self._nodes[blocks[-1]] if blocks else self._root, len(blocks))

    def reserve(self, seq: Hashable, num_blocks: int) -> None:
        """As ``BlockPool.reserve``; idle blocks are evicted if need be, and if that is enough."""
        missing = self.pool.missing(seq, num_blocks)
        if self.pool.num_free < missing <= self.num_available:
            wanted = max(missing, self._evict_at_once)
            while self._idle and self.pool.num_free < wanted:
                self._evict(next(iter(self._idle)))
        if self.window is not None and missing <= self._available:
            self.window.reserve(seq, num_blocks)  # raises before anything has changed
        self.pool.reserve(seq, num_blocks)

    def extend(self, seq: Hashable, read: ReadTokens, num_computed: int, salt: str = "") -> None:
        """Take note that the first ``num_computed`` tokens of a sequence are computed: its full blocks can be found."""
        self._know(seq, read, num_computed, salt)
        if self.window is not None:
            self.window.slide(seq, num_computed)

    def _know(self, seq: Hashable, read: ReadTokens, num_computed: int, salt: str) -> None:
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
            if self.window is not None:
                self.window.know(child, self.window.pool.table(seq)[i])
            node = child
        self._ends[seq] = (node, num_computed // size)

    def free(self, seq: Hashable) -> None:
        """Forget a sequence. Its cached blocks become the most recently used ones, the start of it last."""
        self.pool.free(seq)
        if self.window is not None:
            self.window.free(seq)
        node: _Node | None = self._ends.pop(seq)[0]
        while node is not None and node.parent is not None:
            if self._is_known(node) and not self.pool.holders(node.block):
                self._idle.pop(node.block, None)
                self._idle[node.block] = None
            node = node.parent

    def clear(self) -> None:
        """Forget what is in the blocks: nothing computed so far is found again. No sequence may be live."""
        assert not self._ends, f"sequences {sorted(map(str, self._ends))} are live"
        for block, node in self._nodes.items():
            self.pool.drop(block)
            if self.window is not None:
                self.window.forget(node)
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
        if self.window is not None:
            self.window.check_integrity(found.values())
            tables = [(len(self.pool.table(seq)), len(self.window.pool.table(seq))) for seq in self.pool.sequences]
            if set(self.window.pool.sequences) != set(self.pool.sequences) or any(a != b for a, b in tables):
                raise AssertionError(f"tables of {self.window.pool.sequences} have lengths {tables}")

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
            if self.window is not None:
                self.window.forget(node)
            stack.extend(node.children.values())


def _key(tokens: Sequence[int], start: int, salt: str) -> bytes:
    key = array("q", tokens).tobytes()
    return key if start or not salt else key + salt.encode("utf-8", "surrogatepass")
