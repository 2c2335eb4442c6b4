"""The lines of code on TensorFlow's pages of which this package has the names, and what they become here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROWS = 24
"""Rows of the four files that the samples read."""

ADAPTATIONS = (
    (r"(?m)^@tf\.function\(.*\)\n", ""),  # functions are not compiled
    (r"tf\.add\b", "np.add"),  # NumPy computes
    (r"dataset_ops\.Dataset\.TFRecordDataset\((\[[^]]*\])\)", r"tf.data.Dataset.from_npz(\1)"),  # NumPy's
    (r'"/a/(\d)\.tfr"', r'f"{folder}/\1.npz"'),
    (r"tf\.experimental\.dtensor\.", "dmesh."),
    (r"\btf\.", "dmesh."),
)
"""Everything that is changed: patterns, and what stands in their place."""


@dataclass(frozen=True)
class Sample:
    """Lines of a page, with what a program around them has."""

    code: str
    """Lines as on the page."""
    before: str = ""
    """What the page leaves to the program."""
    after: str = ""
    """What must hold then."""

    def program(self) -> str:
        """Returns them as dmesh runs them."""
        code = self.code
        for pattern, instead in ADAPTATIONS:
            code = re.sub(pattern, instead, code)
        return f"{self.before}\n{code}\n{self.after}\n"


TASKS = Sample(
    before="from dmesh.distribute.cluster_resolver import SimpleClusterResolver",
    code="""
cluster_spec = tf.train.ClusterSpec({
    "ps":["localhost:2222", "localhost:2223"],
    "worker":["localhost:2224", "localhost:2225", "localhost:2226"]
})
simple_resolver = SimpleClusterResolver(cluster_spec, task_type="worker",
                                        task_id=0)
cluster_resolver = simple_resolver
if cluster_resolver.task_type == 'worker' and cluster_resolver.task_id == 0:
  done = "on task 0"
else:
  done = "elsewhere"
if cluster_resolver.task_type == 'worker':
  done += " of the workers"
elif cluster_resolver.task_type == 'ps':
  done += " of the parameter servers"
""",
    after='assert done == "on task 0 of the workers"',
)

CONSTRUCTION = Sample(
    code="""
resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu='')
tf.config.experimental_connect_to_cluster(resolver)
tf.tpu.experimental.initialize_tpu_system(resolver)
strategy = tf.distribute.experimental.TPUStrategy(resolver)
""",
    after="""
assert strategy.num_replicas_in_sync == 8
assert strategy.cluster_resolver is resolver
assert strategy.extended.num_hosts == dmesh.num_clients()
assert (resolver.task_type, resolver.task_id) == ("worker", dmesh.client_id())
assert resolver.num_accelerators() == {"TPU": 8 // dmesh.num_clients()}
""",
)

LOGICAL_DEVICE = Sample(
    before="inputs = [np.arange(3.0)]",
    code="""
resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu='')
tf.config.experimental_connect_to_cluster(resolver)
topology = tf.tpu.experimental.initialize_tpu_system(resolver)
device_assignment = tf.tpu.experimental.DeviceAssignment.build(
    topology,
    computation_shape=[1, 1, 1, 2],
    num_replicas=4)
strategy = tf.distribute.TPUStrategy(
    resolver, experimental_device_assignment=device_assignment)
iterator = iter(inputs)

@tf.function()
def step_fn(inputs):
  output = tf.add(inputs, inputs)
  output = strategy.experimental_assign_to_logical_device(output, 0)
  return output

result = strategy.run(step_fn, args=(next(iterator),))
""",
    after="""
parts = strategy.experimental_local_results(result)
assert len(parts) == 4 // dmesh.num_clients()
assert all(np.array_equal(part, [0.0, 2.0, 4.0]) for part in parts)
""",
)

DATASET = Sample(
    before="""
seen = []
def replica_fn(x):
  seen.append(len(x["x"]))
""",
    code="""
strategy = tf.distribute.MirroredStrategy()
dataset = dataset_ops.Dataset.TFRecordDataset([
    "/a/1.tfr", "/a/2.tfr", "/a/3.tfr", "/a/4.tfr"])
dataset = dataset.batch(8)
dist_dataset = strategy.experimental_distribute_dataset(dataset)
for x in dist_dataset:
  strategy.run(replica_fn, args=(x,))
""",
    after=f"assert sum(seen) == {ROWS}, seen",
)

ELEMENT_SPEC = Sample(
    before="totals = []",
    code="""
strategy = tf.distribute.TPUStrategy(resolver)
dataset = dataset_ops.Dataset.TFRecordDataset([
    "/a/1.tfr", "/a/2.tfr", "/a/3.tfr", "/a/4.tfr"])
dataset = dataset.batch(8)
dist_dataset = strategy.experimental_distribute_dataset(dataset)

@tf.function(input_signature=[dist_dataset.element_spec])
def train_step(inputs):
  return inputs["x"].sum()

for x in dist_dataset:
  totals.append(strategy.reduce("SUM", strategy.run(train_step, args=(x,)), axis=None))
""",
    after=f"""
assert sum(totals) == {sum(range(ROWS))}, totals
assert iter(dist_dataset).get_next_as_optional().element_spec["x"] is not None
""",
)

FROM_FUNCTION = Sample(
    code="""
global_batch_size = 8
def dataset_fn(input_context):
  batch_size = input_context.get_per_replica_batch_size(global_batch_size)
  d = tf.data.Dataset.from_tensors([[1.]]).repeat().batch(batch_size)
  return d.shard(
      input_context.num_input_pipelines, input_context.input_pipeline_id)

inputs = strategy.experimental_distribute_datasets_from_function(dataset_fn)
""",
    after="""
for _, x in zip(range(3), inputs):
  assert strategy.reduce("SUM", strategy.run(np.sum, args=(x,)), axis=None) == global_batch_size
""",
)

INITIALIZATION = Sample(
    code="""
device_type = tf.experimental.dtensor.initialize_accelerator_system(
    device_type=None,
    enable_coordination_service=True,
    num_logical_cpu_devices=None,
    experimental_reset_context=False
)
""",
    after="""
assert device_type == dmesh.preferred_device_type() == "TPU"
assert dmesh.num_global_devices("CPU") == dmesh.num_global_devices("TPU") == 8
dmesh.shutdown_accelerator_system()
""",
)

ON_A_TPU = (TASKS, CONSTRUCTION, LOGICAL_DEVICE, DATASET, ELEMENT_SPEC, FROM_FUNCTION)
"""Samples that one program may run one after the other."""


def program(samples: Sequence[Sample], folder: Path, end: str = "") -> str:
    """Returns a program that runs samples, and says so.

    Args:
        samples: The samples.
        folder: Where the files are that they read.
        end: What it does at last.
    """
    return "\n".join(
        [
            f"import numpy as np\nimport dmesh\nfolder = {str(folder)!r}",
            *(sample.program() for sample in samples),
            'print(f"client {dmesh.client_id()} of {dmesh.num_clients()}: all samples ran")',
            end,
        ]
    )


def write_files(folder: Path) -> None:
    """Writes the files that the samples read."""
    for number, part in enumerate(np.arange(float(ROWS)).reshape(4, -1), 1):
        np.savez(folder / f"{number}.npz", x=part)
