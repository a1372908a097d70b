"""The items of a list in each row, in an order found for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchradix.types import I32, I64, Row


@dataclass(frozen=True, slots=True)
class PassageOrders:
    """``orders``: int32[m], of input row ``i`` the places of the items of its list in ``column``,
    ``[offsets[i], offsets[i + 1])``; ``offsets``: int64[n + 1]."""

    column: str
    offsets: I64
    orders: I32

    def arranged(self, row: Row) -> Row:
        """The row with its list in its order; as it is where it has no such list."""
        items = row.values.get(self.column)
        if not isinstance(items, (list, tuple)) or row.index + 1 >= len(self.offsets):
            return row
        order = self.orders[self.offsets[row.index] : self.offsets[row.index + 1]].tolist()
        return replace(row, values=row.values | {self.column: [items[place] for place in order]})
