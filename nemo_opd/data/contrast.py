"""Records with the fields of others, for the contrast of teachers' contexts (methods.md §13)."""

import datasets

from nemo_opd.data.documents import OTHER, is_field
from nemo_opd.errors import DataError


def with_others(documents: datasets.Dataset, key: str) -> datasets.Dataset:
    """Add the fields of another record to each: of the one that is half of all rows further.

    key: where the data stand in the settings. Raises DataError for a single record.
    """
    number = len(documents)
    if number < 2:
        raise DataError(
            f"{key} has {number} record, and contrast=true of a teacher's context takes another record's; give more "
            "records, or write contrast=false"
        )
    names = [name for name in documents.column_names if is_field(name)]
    own, middle = documents.select_columns(names), number // 2
    others = datasets.concatenate_datasets([own.select(range(middle, number)), own.select(range(middle))])
    others = others.rename_columns({name: OTHER + name for name in names})
    return datasets.concatenate_datasets([documents, others], axis=1)
