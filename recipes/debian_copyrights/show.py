"""Prints answers beside what was read by hand, and how many of them agree.

python show.py answers.arrow
"""

from __future__ import annotations

import argparse
from pathlib import Path

import polars as pl

BY_HAND = Path(__file__).with_name("by_hand.csv")


def compare(answers: pl.DataFrame, by_hand: pl.DataFrame) -> pl.DataFrame:
    """One row for each answer that was read by hand, with ``*_right`` for each field.

    Several licences are right where the file offers a choice or the list has no exact name
    (``GPL|LGPL``); a holder is right when it holds the name that was read.
    """
    table = answers.select("id", "status", pl.col("value").struct.unnest())
    holder, licence = pl.col("holder").str.to_lowercase(), pl.col("licence").cast(pl.String)
    right = by_hand.rename({name: f"{name}_by_hand" for name in by_hand.columns if name != "id"})
    return table.join(right, on="id", maintain_order="left").with_columns(
        holder_right=holder.str.contains(
            pl.col("holder_by_hand").str.to_lowercase(), literal=True
        ).fill_null(False),
        year_right=pl.col("year").eq_missing(pl.col("year_by_hand")),
        licence_right=pl.col("licence_by_hand").str.split("|").list.contains(licence),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints answers beside what was read by hand.")
    parser.add_argument("answers", help="the .arrow file of a run")
    parser.add_argument("--rows", type=int, default=8)
    options = parser.parse_args()
    table = compare(pl.read_ipc(options.answers), pl.read_csv(BY_HAND))
    with pl.Config(
        tbl_hide_dataframe_shape=True, tbl_rows=-1, fmt_str_lengths=40, tbl_width_chars=90
    ):
        print(table.select("id", "holder", "year", "licence").head(options.rows))
    for field in ("holder", "year", "licence"):
        print(f"{field}: {table[f'{field}_right'].sum()} of {len(table)} as read by hand")


if __name__ == "__main__":
    main()
