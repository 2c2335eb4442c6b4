"""`DTensorDataset`: batches of a dataset as sharded arrays."""

from __future__ import annotations

from typing import Any

from dmesh.arrays import copy_to_mesh
from dmesh.data import Dataset
from dmesh.data.iterator import DatasetIterator
from dmesh.errors import ArgumentTypeError, DatasetError, InputModeError, LayoutError
from dmesh.layout import Layout
from dmesh.mesh import Mesh
from dmesh.structure import flatten, map_structure, outline


class DTensorDataset:
    """Dataset of batches of sharded arrays, like `tf.experimental.dtensor.DTensorDataset`.

    The dataset must be the same on all clients: each of them reads whole batches, and keeps its own blocks.

    ```python
    dataset = dmesh.data.Dataset.from_tensor_slices((images, labels)).shuffle(1000, seed=1)
    layouts = dmesh.Layout(["batch", "unsharded"], mesh), dmesh.Layout(["batch"], mesh)
    for x, y in dmesh.DTensorDataset(dataset, mesh=mesh, layouts=layouts, global_batch_size=64,
        batch_dim="batch"): ...
    ```

    Args:
        dataset: The dataset, of single elements.
        mesh: Where the batches lie.
        layouts: Layout of each array of an element, in the structure of the elements; its first dimension
            is that of the batch.
        global_batch_size: Number of elements of a batch, over all devices. A last batch of fewer is left out.
        dataset_already_batched: True if the dataset's elements are batches themselves, each for one
            replica: of `global_batch_size` by the number of devices along `batch_dim`.
        batch_dim: Mesh dimension that cuts the batches; None if none does.
        prefetch: Number of batches to read ahead; None for none.
        tf_data_service_config: Refused: there is no such service.

    Raises:
        LayoutError: A layout does not fit, or the batches cannot be cut evenly.
        DatasetError: The elements do not fit.
        InputModeError: `tf_data_service_config` was passed.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        mesh: Mesh,
        layouts: Any,
        global_batch_size: int,
        dataset_already_batched: bool = False,
        batch_dim: str | None = None,
        prefetch: int | None = None,
        tf_data_service_config: Any = None,
    ) -> None:
        if tf_data_service_config is not None:
            raise InputModeError("DTensorDataset has no tf.data service: leave tf_data_service_config= out")
        if not isinstance(dataset, Dataset):
            raise ArgumentTypeError(
                f"DTensorDataset takes a dmesh.data.Dataset, got {type(dataset).__name__}"
            )
        if not isinstance(mesh, Mesh):
            raise ArgumentTypeError(f"mesh= must be a dmesh.Mesh, got {type(mesh).__name__}")
        specs, found = flatten(dataset.element_spec), flatten(layouts)
        if not specs:
            raise DatasetError("DTensorDataset needs a dataset whose elements have at least one array")
        if outline(dataset.element_spec) != outline(layouts) or not all(
            isinstance(one, Layout) for one in found
        ):
            raise LayoutError(
                "layouts= must be layouts in the structure of the elements, "
                f"{outline(dataset.element_spec)}; "
                f"got {outline(layouts)}"
            )
        replicas = 1 if batch_dim is None else mesh.dim_size(batch_dim)
        if global_batch_size < 1 or global_batch_size % replicas:
            raise LayoutError(
                f"global_batch_size must be a multiple of the {replicas} devices along {batch_dim!r}, got "
                f"{global_batch_size}"
            )
        for layout in found:
            if layout.mesh != mesh:
                raise LayoutError(f"a layout is of another mesh than {mesh.name!r}: {layout.sharding_specs}")
            if batch_dim is not None and batch_dim not in layout.sharding_specs[:1]:
                raise LayoutError(
                    f"batch_dim {batch_dim!r} was passed, but the layout {layout.sharding_specs} does "
                    "not cut its "
                    "first dimension along it"
                )
        for spec, layout in zip(specs, found, strict=True):
            if spec.shape is None:
                raise DatasetError(
                    f"the number of dimensions of the elements {spec} is not known: "
                    "say it in output_signature="
                )
            rank = len(spec.shape) + (not dataset_already_batched)
            if layout.rank != rank:
                raise LayoutError(
                    f"expected a layout for {rank} dimensions, the batch's included, for elements "
                    f"{spec}, got "
                    f"{layout.sharding_specs}: pass the dataset before it is batched, or "
                    "dataset_already_batched=True"
                )
        if dataset_already_batched:
            self._check_batches(specs, global_batch_size // replicas)
            dataset = dataset.rebatch(global_batch_size, drop_remainder=True)
        else:
            dataset = dataset.batch(global_batch_size, drop_remainder=True)
        self._dataset = dataset if prefetch is None else dataset.prefetch(prefetch)
        self._layouts = layouts

    @staticmethod
    def _check_batches(specs: list[Any], size: int) -> None:
        for spec in specs:
            if not spec.shape or spec.shape[0] is None:
                raise DatasetError(
                    f"the size of the batches {spec} is not known: batch the dataset with drop_remainder=True"
                )
            if spec.shape[0] != size:
                raise DatasetError(
                    f"the batches {spec} have size {spec.shape[0]}, but global_batch_size and the "
                    f"mesh give {size} "
                    "for each replica"
                )

    @property
    def element_spec(self) -> Any:
        """Structure of `TensorSpec` of the global batches."""
        return self._dataset.element_spec

    def __len__(self) -> int:
        return len(self._dataset)

    def __bool__(self) -> bool:
        return True  # whether there are elements may not be known

    def __iter__(self) -> DTensorIterator:
        return DTensorIterator(self._dataset, self._layouts)


class DTensorIterator(DatasetIterator):
    """Iterator over the batches of a `DTensorDataset`.

    Args:
        batches: Dataset of the whole batches.
        layouts: Layout of each of their arrays.
    """

    def __init__(self, batches: Dataset, layouts: Any) -> None:
        super().__init__(batches.node)
        self._layouts = layouts

    def __next__(self) -> Any:
        batch = super().__next__()
        return map_structure(lambda x, layout: copy_to_mesh(x, layout, uneven=True), batch, self._layouts)
