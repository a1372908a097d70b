/* Rows of 8 or 16 bits times panels, by tiles. Included once by a linear layer, which defines
 *   LINEAR           the type of its context, with `x` [num_rows, in_size] and `packed`
 *   MULTIPLY         the product of two tiles
 *   begin_panel(const LINEAR *, int64_t column), panel_at(...), panel_bytes(const LINEAR *)
 *                    makes a panel ready, says where it is, and how much of the next one may be
 *                    fetched from behind it
 *   finish_sums(const LINEAR *, struct sums *, int count)
 *                    writes up to `count` more rows of sums to the output
 * and `struct sums`: `values` [32][32] of four bytes each, the `row` and `column` of the first, how
 * many `rows` there are, and the `next` to go out. Rows are a multiple of 64 bytes. */
#define TILE_BYTES 64 /* of a row, that are multiplied at a time */

/* Multiplies up to 32 rows by a panel while the `before` sums go to the output and, for every tile,
 * `lines` lines from `ahead` on into the second-level cache. */
BX_TARGET_AMX BX_INLINE void rows_amx(const LINEAR *c, struct sums *s, struct sums *before,
                                      const char *ahead, int lines, const int two)
{
    const int64_t bytes = c->in_size * (int64_t)sizeof *c->x;
    const char *left = (const char *)panel_at(c, s->column), *right = left + BX_BLOCK * bytes;
    const char *upper = (const char *)c->x + s->row * bytes, *lower = upper + 16 * bytes;
    int a_time = (int)((BX_PANEL_ROWS * TILE_BYTES + bytes - 1) / bytes);
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
        _tile_zero(2);
        _tile_zero(3);
    }
    _tile_loadd(4, upper, bytes);
    _tile_loadd(6, left, 64);
    _tile_loadd(7, right, 64);
    if (two)
        _tile_loadd(5, lower, bytes);
    for (int64_t k = 0; k < bytes; k += TILE_BYTES) {
        /* A tile is loaded anew right after its last product; the last ones for nothing. */
        int64_t next = k + TILE_BYTES < bytes ? k + TILE_BYTES : k;
        MULTIPLY(0, 4, 6);
        MULTIPLY(1, 4, 7);
        _tile_loadd(4, upper + next, bytes);
        if (two)
            MULTIPLY(2, 5, 6);
        _tile_loadd(6, left + next * BX_BLOCK, 64);
        if (two) {
            MULTIPLY(3, 5, 7);
            _tile_loadd(5, lower + next, bytes);
        }
        _tile_loadd(7, right + next * BX_BLOCK, 64);
        for (int line = 0; line < lines; line++, ahead += 64)
            __builtin_prefetch(ahead, 0, 2);
        finish_sums(c, before, a_time);
    }
    const int stride = BX_PANEL * sizeof s->values[0];
    _tile_stored(0, s->values, stride);
    _tile_stored(1, s->values + BX_BLOCK, stride);
    if (two) {
        _tile_stored(2, s->values + 16 * BX_PANEL, stride);
        _tile_stored(3, s->values + 16 * BX_PANEL + BX_BLOCK, stride);
    }
}

BX_TARGET_AMX static void panels_amx(const void *context, int64_t begin, int64_t end,
                                     int64_t first, int64_t last)
{
    const LINEAR *c = context;
    const int64_t bytes = c->in_size * (int64_t)sizeof *c->x;
    struct sums sums[2];
    int turn = 0, configured = 0;
    sums[0].rows = sums[1].rows = sums[0].next = sums[1].next = 0;
    /* A panel has 32 lines for each tile of a row; the next one comes while this is multiplied. */
    int lines = (int)((32 * BX_PANEL_ROWS + last - first - 1) / (last - first));
    lines = panel_bytes(c) == 0 ? 0 : lines < 32 ? lines : 32;
    for (int64_t column = begin * BX_PANEL; column < end * BX_PANEL; column += BX_PANEL) {
        begin_panel(c, column);
        for (int64_t row = first; row < last; row += BX_PANEL_ROWS) {
            struct sums *s = &sums[turn], *before = &sums[!turn];
            s->row = row;
            s->column = column;
            s->rows = last - row < BX_PANEL_ROWS ? (int)(last - row) : BX_PANEL_ROWS;
            s->next = 0;
            if (s->rows != configured)
                bx_configure_tiles(configured = s->rows);
            const char *ahead = (const char *)panel_at(c, column) + panel_bytes(c);
            ahead += (row - first) / BX_PANEL_ROWS * (bytes / TILE_BYTES) * lines * 64;
            if (s->rows > 16)
                rows_amx(c, s, before, ahead, lines, 1);
            else
                rows_amx(c, s, before, ahead, lines, 0);
            turn = !turn;
        }
    }
    finish_sums(c, &sums[!turn], BX_PANEL_ROWS);
    _tile_release();
}
