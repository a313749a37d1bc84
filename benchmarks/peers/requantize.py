"""Write a GGUF file again with all its matrices in one type, so that a peer runs the same weights at another precision.

python requantize.py model.gguf Q8_0 out.gguf      (needs the package gguf)
"""

import sys
from pathlib import Path

import gguf


def requantize(source: Path, type_name: str, target: Path) -> None:
    """Write `target` with the metadata of `source`; vectors (norms, biases) stay float32."""
    quantization = gguf.GGMLQuantizationType[type_name]
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    skipped = {"general.architecture", "general.file_type"}
    for name, stored in reader.fields.items():
        if name.startswith("GGUF.") or name in skipped:
            continue
        value_type = stored.types[0]
        sub_type = stored.types[-1] if value_type is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, stored.contents(), value_type, sub_type)
    writer.add_file_type(gguf.LlamaFileType[{"F32": "ALL_F32"}.get(type_name, f"MOSTLY_{type_name}")])
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        own = quantization if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quantize(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    requantize(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
