"""Documents of a Parquet file, page checksums verified, one batch of rows in memory at a time."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from nsa_core.data.documents import Document, RecordOrigin, Tallies, take_text
from nsa_core.data.reporting import DataError

ROWS_AT_A_TIME = 256


def read_parquet(path: Path, name: str, text_key: str, tallies: Tallies) -> Iterator[Document]:
    """Yield the documents of a Parquet file; an origin's line is the row, counted from 1.

    Raises:
        DataError: If the file is no whole Parquet file, has no text column of that name (the
            message names the columns), or a page does not match its checksum.
    """
    row = 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            _check_column(file.schema_arrow, path, text_key)
            for batch in file.iter_batches(batch_size=ROWS_AT_A_TIME, columns=[text_key]):
                for text in batch.column(0):
                    row += 1
                    yield from _take_cell(text, text_key, RecordOrigin(name, row), tallies)
    except (pa.ArrowException, OSError) as error:
        message = f"{path} cannot be read after row {row}: {error}"
        raise DataError(message, "fetch the file again, or remove it") from error


def _take_cell(
    cell: pa.Scalar, text_key: str, origin: RecordOrigin, tallies: Tallies
) -> Iterator[Document]:
    if not cell.is_valid:
        tallies.reject(f"`{text_key}` is null", origin)
        return
    try:
        text = cell.as_py()
    except UnicodeDecodeError:
        tallies.reject("not UTF-8", origin)
        return
    yield from take_text(text, origin, tallies)


def _check_column(schema: pa.Schema, path: Path, text_key: str) -> None:
    columns = ", ".join(f"`{column.name}` ({column.type})" for column in schema)
    if text_key not in schema.names:
        message = f"{path} has no column `{text_key}`; its columns are {columns}"
        raise DataError(message, "name the text column with data.text_key")
    found = schema.field(text_key).type
    if not (pa.types.is_string(found) or pa.types.is_large_string(found)):
        message = f"column `{text_key}` of {path} is {found}, not text; its columns are {columns}"
        raise DataError(message, "name the text column with data.text_key")
