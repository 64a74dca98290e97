"""Fields of another record, for contrasting teachers' contexts (methods.md §13)."""

import datasets

from nemo_opd.data.documents import OTHER, is_field
from nemo_opd.errors import DataError


def with_others(documents: datasets.Dataset, key: str) -> datasets.Dataset:
    """Add to each record the fields of the record half the dataset further on.

    key: the dataset's key in the settings. Raises DataError for a single record.
    """
    number = len(documents)
    if number < 2:
        raise DataError(
            f"{key} has {number} record, but contrast=true in a teacher's context needs another one; give more "
            "records, or set contrast=false"
        )
    names = [name for name in documents.column_names if is_field(name)]
    fields, middle = documents.select_columns(names), number // 2
    rotated = datasets.concatenate_datasets([fields.select(range(middle, number)), fields.select(range(middle))])
    rotated = rotated.rename_columns({name: OTHER + name for name in names})
    return datasets.concatenate_datasets([documents, rotated], axis=1)
