//! The import: what lands in the folder, that the weights in it are the file's, and that what cannot be imported is named.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use emberd::models::import::{Form, ImportError, Imported, MANIFEST, import_gguf};
use emberd::models::onnx::proto::{ModelProto, TensorProto};
use emberd::models::output::hex;
use prost::Message;
use sha2::{Digest, Sha256};

use super::writer::{BF16, F16, F32, File, IQ2_XXS, Numbers, Q4_0, Q4_1, Q8_0, TINY, tiny};

fn import_into(file: &File, folder: &Path, form: Form) -> Result<Imported, ImportError> {
    let source = tempfile::tempdir().unwrap();
    let path = source.path().join("tiny.gguf");
    fs::write(&path, file.bytes()).unwrap();
    import_gguf(&path, folder, form, &mut |_, _| {})
}

#[test]
fn an_engine_that_reads_the_file_gets_it_as_it_is_beside_its_tokenizer() {
    let (folder, file) = (tempfile::tempdir().unwrap(), tiny(Q4_1, Q8_0));
    let imported = import_into(&file, folder.path(), Form::Mlx).unwrap();
    assert_eq!(fs::read(folder.path().join("model.gguf")).unwrap(), file.bytes());
    let mut names: Vec<String> =
        fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["config.json", "emberd.json", "generation_config.json", "model.gguf", "tokenizer.json", "tokenizer_config.json"]);
    let listed = imported.files.iter().find(|each| each.name == "model.gguf").unwrap();
    assert_eq!((listed.bytes, &listed.sha256), (imported.source.bytes, &imported.source.sha256));
    emberd::models::folder::check(folder.path()).unwrap();
}

/// An imported model, with its constants as bytes.
struct Model {
    proto: ModelProto,
    data: Vec<u8>,
}

impl Model {
    fn new(file: &File, form: Form) -> Self {
        let folder = tempfile::tempdir().unwrap();
        import_into(file, folder.path(), form).unwrap();
        let read = |name: &str| fs::read(folder.path().join(name)).unwrap();
        Self { proto: ModelProto::decode(&read("model.onnx")[..]).unwrap(), data: read("model.onnx.data") }
    }

    fn constants(&self) -> HashMap<&str, &TensorProto> {
        let all = &self.proto.graph.as_ref().unwrap().initializer;
        all.iter().map(|tensor| (tensor.name.as_deref().unwrap(), tensor)).collect()
    }

    fn bytes(&self, name: &str) -> &[u8] {
        let constants = self.constants();
        let place: HashMap<&str, &str> =
            constants[name].external_data.iter().map(|entry| (entry.key.as_deref().unwrap(), entry.value.as_deref().unwrap())).collect();
        let (offset, length): (usize, usize) = (place["offset"].parse().unwrap(), place["length"].parse().unwrap());
        &self.data[offset..offset + length]
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        self.bytes(name).as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    fn operators(&self) -> Vec<&str> {
        self.proto.graph.as_ref().unwrap().node.iter().map(|node| node.op_type.as_deref().unwrap()).collect()
    }
}

/// Values of a tensor of the file, dequantized by their definition; rows put back where the rotary embedding expects them.
fn expected(file: &File, name: &str, heads: usize) -> (Vec<f64>, Vec<f64>) {
    let (_, dims, kind, data) = file.tensors.iter().find(|(found, ..)| found == name).unwrap();
    let columns = dims[0] as usize;
    let rows = dims.get(1).map_or(1, |rows| *rows as usize);
    let half = |bytes: &[u8]| f64::from(half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32());
    let (mut values, mut steps) = (Vec::new(), Vec::new());
    match *kind {
        Q4_0 | Q4_1 => {
            let header = if *kind == Q4_1 { 4 } else { 2 };
            for block in data.chunks(header + 16) {
                let scale = half(block);
                let minimum = if *kind == Q4_1 { half(&block[2..]) } else { -8.0 * scale };
                let codes = block[header..].iter().map(|byte| byte & 15).chain(block[header..].iter().map(|byte| byte >> 4));
                values.extend(codes.map(|code| scale * f64::from(code) + minimum));
                steps.extend([scale; 32]);
            }
        }
        Q8_0 => data.chunks(34).for_each(|block| values.extend(block[2..].iter().map(|code| half(block) * f64::from(code.cast_signed())))),
        F32 => values.extend(data.as_chunks().0.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes)))),
        _ => values.extend(data.chunks(2).map(half)),
    }
    if heads == 0 {
        return (values, steps);
    }
    // Within a head of the file, element 2i is the original's i and element 2i + 1 the original's i + size / 2.
    let size = rows / heads;
    let place = |row: usize| row / size * size + (row % size) / 2 + (row % 2) * (size / 2);
    let reorder = |from: &[f64]| {
        let mut to = vec![0.0; from.len()];
        for row in 0..from.len() / columns {
            to[place(row) * columns..][..columns].copy_from_slice(&from[row * columns..][..columns]);
        }
        to
    };
    let steps = reorder(&steps);
    (reorder(&values), steps)
}

/// The matrix that a four-bit product multiplies with: codes less zero points, and what the block sums add.
fn effective(model: &Model, name: &str, rows: usize, columns: usize) -> Vec<f64> {
    let (codes, scales, zeros) =
        (model.bytes(&format!("{name}/codes")), model.floats(&format!("{name}/scales")), model.bytes(&format!("{name}/zeros")));
    let blocks = scales.len() / rows;
    let zero_bytes = zeros.len() / rows;
    let value = |row: usize, column: usize| {
        let (block, within) = (column / 32, column % 32);
        let byte = codes[(row * blocks + block) * 16 + within / 2];
        let zero = zeros[row * zero_bytes + block / 2] >> (4 * (block % 2)) & 15;
        let code = if within % 2 == 0 { byte & 15 } else { byte >> 4 };
        f64::from(scales[row * blocks + block]) * (f64::from(code) - f64::from(zero))
    };
    let digit_width = columns.div_ceil(32).div_ceil(32) * 32;
    let digits = (blocks * 32 - columns) / digit_width;
    let mut out = Vec::new();
    for row in 0..rows {
        for column in 0..columns {
            let rest: f64 = (0..digits).map(|digit| value(row, columns + digit * digit_width + column / 32)).sum();
            out.push(value(row, column) + rest);
        }
    }
    out
}

#[test]
fn the_folder_holds_what_the_manifest_lists() {
    for form in [Form::Exact, Form::Fast, Form::Fp32] {
        let folder = tempfile::tempdir().unwrap();
        let file = tiny(Q4_1, Q8_0);
        let imported = import_into(&file, folder.path(), form).unwrap();
        let manifest: Imported = serde_json::from_slice(&fs::read(folder.path().join(MANIFEST)).unwrap()).unwrap();
        assert_eq!(manifest, imported);
        assert_eq!(imported.source.name, "tiny.gguf");
        assert_eq!(imported.source.sha256, hex(&Sha256::digest(file.bytes())));
        let mut names: Vec<String> = imported.files.iter().map(|entry| entry.name.clone()).collect();
        for entry in &imported.files {
            let content = fs::read(folder.path().join(&entry.name)).unwrap();
            assert_eq!((content.len() as u64, hex(&Sha256::digest(&content))), (entry.bytes, entry.sha256.clone()));
        }
        names.push(MANIFEST.to_owned());
        names.sort();
        let mut found: Vec<String> =
            fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        found.sort();
        assert_eq!(found, names);
        assert!(names.contains(&"tokenizer.json".to_owned()) && names.contains(&"config.json".to_owned()));
    }
}

#[test]
fn an_import_is_the_same_every_time() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [first, second] = folders.each_ref().map(|folder| import_into(&tiny(Q4_1, Q8_0), folder.path(), Form::Exact).unwrap());
    assert_eq!(first, second);
}

#[test]
fn the_graph_keeps_its_contract() {
    let (layers, _, kv_heads, head_dim, _, _, vocab) = TINY;
    let model = Model::new(&tiny(Q4_1, Q8_0), Form::Exact);
    let graph = model.proto.graph.as_ref().unwrap();
    let describe = |infos: &[emberd::models::onnx::proto::ValueInfoProto]| -> Vec<String> {
        infos
            .iter()
            .map(|info| {
                let tensor = info.r#type.as_ref().unwrap().tensor_type.as_ref().unwrap();
                let dims = tensor.shape.as_ref().unwrap().dim.iter().map(|dim| match dim.value.as_ref().unwrap() {
                    emberd::models::onnx::proto::Dimension::Size(size) => size.to_string(),
                    emberd::models::onnx::proto::Dimension::Symbol(name) => name.clone(),
                });
                let kind = if tensor.elem_type == Some(1) { "float" } else { "int64" };
                format!("{} {kind} {}", info.name.as_deref().unwrap(), dims.collect::<Vec<_>>().join(","))
            })
            .collect()
    };
    let (mut inputs, mut outputs) = (
        vec!["input_ids int64 batch,sequence".to_owned(), "attention_mask int64 batch,width".to_owned()],
        vec![
            format!("logits float batch,1,{vocab}"),
            "argmax int64 batch".to_owned(),
            "topk_values float batch,256".to_owned(),
            "topk_indices int64 batch,256".to_owned(),
        ],
    );
    for layer in 0..layers {
        for part in ["key", "value"] {
            inputs.push(format!("past_key_values.{layer}.{part} float batch,{kv_heads},capacity,{head_dim}"));
            outputs.push(format!("present.{layer}.{part} float batch,{kv_heads},capacity,{head_dim}"));
        }
    }
    assert_eq!(describe(&graph.input), inputs);
    assert_eq!(describe(&graph.output), outputs);
}

#[test]
fn every_name_in_the_graph_is_made_once_and_before_it_is_used() {
    for (kind, embedding) in [(Q4_1, Q8_0), (Q4_0, F16), (Q8_0, Q4_1), (F32, F32), (BF16, Q4_0)] {
        for form in [Form::Exact, Form::Fast, Form::Fp32] {
            let model = Model::new(&tiny(kind, embedding), form);
            let graph = model.proto.graph.as_ref().unwrap();
            let inputs = graph.input.iter().map(|info| info.name.clone().unwrap());
            let mut known: Vec<String> = inputs.chain(graph.initializer.iter().map(|tensor| tensor.name.clone().unwrap())).collect();
            for node in &graph.node {
                for input in node.input.iter().filter(|name| !name.is_empty()) {
                    assert!(known.contains(input), "{input} is used before it is made");
                }
                known.extend(node.output.iter().filter(|name| !name.is_empty()).cloned());
            }
            for output in &graph.output {
                assert!(known.contains(output.name.as_ref().unwrap()));
            }
            let count = known.len();
            known.sort();
            known.dedup();
            assert_eq!(count, known.len(), "a name is made twice");
        }
    }
}

#[test]
fn constants_lie_inside_the_data_file_aligned_and_apart() {
    let model = Model::new(&tiny(Q4_1, Q8_0), Form::Exact);
    let mut places = Vec::new();
    for (name, tensor) in model.constants() {
        let Some(inline) = &tensor.raw_data else {
            let bytes = model.bytes(name);
            let offset = bytes.as_ptr() as usize - model.data.as_ptr() as usize;
            assert_eq!(offset % if bytes.len() >= 1 << 16 { 4096 } else { 64 }, 0, "{name}");
            let size = if tensor.data_type == Some(1) { 4 } else { 1 };
            assert_eq!(tensor.dims.iter().product::<i64>() as usize * size, bytes.len(), "{name}");
            places.push((offset, offset + bytes.len()));
            continue;
        };
        assert_eq!(inline.len() as i64, 8 * tensor.dims.iter().product::<i64>());
    }
    places.sort_unstable();
    assert!(places.windows(2).all(|pair| pair[0].1 <= pair[1].0));
    assert_eq!(places.last().unwrap().1, model.data.len());
}

#[test]
fn floats_are_the_files_values_with_rotary_rows_put_back() {
    let (_, heads, kv_heads, ..) = TINY;
    for kind in [F32, F16, Q8_0, Q4_0, Q4_1] {
        let file = tiny(kind, Q8_0);
        let model = Model::new(&file, Form::Fp32);
        let qkv: Vec<f64> = [("attn_q", heads), ("attn_k", kv_heads), ("attn_v", 0)]
            .iter()
            .flat_map(|(part, heads)| expected(&file, &format!("blk.1.{part}.weight"), *heads).0)
            .collect();
        let found = model.floats("layer.1/qkv/weight");
        assert_eq!(found.len(), qkv.len());
        assert!(found.iter().zip(&qkv).all(|(found, expected)| (f64::from(*found) - expected).abs() < 1e-6));
        let embedding = expected(&file, "token_embd.weight", 0).0;
        assert!(
            model.floats("embedding/weight").iter().zip(&embedding).all(|(found, expected)| (f64::from(*found) - expected).abs() < 1e-6)
        );
    }
}

#[test]
fn four_bit_blocks_stay_what_they_are_on_the_fast_kernel() {
    let (_, heads, kv_heads, _, width, inner, _) = TINY;
    for kind in [Q4_0, Q4_1] {
        let file = tiny(kind, Q8_0);
        let model = Model::new(&file, Form::Exact);
        let parts = |names: &[(&str, usize)]| {
            let all = names.iter().map(|(part, heads)| expected(&file, &format!("blk.0.{part}.weight"), *heads));
            let (values, steps): (Vec<_>, Vec<_>) = all.unzip();
            (values.concat(), steps.concat())
        };
        for (name, (values, steps), columns) in [
            ("qkv", parts(&[("attn_q", heads), ("attn_k", kv_heads), ("attn_v", 0)]), width),
            ("attention", parts(&[("attn_output", 0)]), width),
            ("gate_up", parts(&[("ffn_gate", 0), ("ffn_up", 0)]), width),
            ("feed_forward", parts(&[("ffn_down", 0)]), inner),
        ] {
            let found = effective(&model, &format!("layer.0/{name}"), values.len() / columns, columns);
            // What is left of the minimums is held to 1/225 of the largest of them in a row. A quantizer leaves at most half a
            // step; these random minimums leave up to 0.3.
            for ((found, expected), row_steps) in found.chunks(columns).zip(values.chunks(columns)).zip(steps.chunks(columns)) {
                let largest = row_steps.iter().fold(0.0_f64, |most, step| most.max(*step));
                let rest = if kind == Q4_1 { (0.3 + largest / 2.0) / 224.0 } else { 1e-12 };
                assert!(found.iter().zip(expected).all(|(found, expected)| (found - expected).abs() <= rest), "{name}");
            }
        }
    }
}

#[test]
fn the_embedding_is_held_once() {
    let model = Model::new(&tiny(Q4_1, Q8_0), Form::Exact);
    let (.., width, _, vocab) = TINY;
    let large: Vec<_> = model.constants().into_iter().filter(|(_, tensor)| tensor.dims.first() == Some(&(vocab as i64))).collect();
    assert_eq!(large.len(), 2, "{large:?}");
    let codes: Vec<u8> = model.bytes("embedding/codes").to_vec();
    assert_eq!(codes.len(), vocab * width);
    let found: Vec<f64> = codes
        .chunks(32)
        .zip(model.floats("embedding/scales"))
        .flat_map(|(codes, scale)| codes.iter().map(move |code| f64::from(scale) * (f64::from(*code) - 128.0)))
        .collect();
    assert_eq!(found, expected(&tiny(Q4_1, Q8_0), "token_embd.weight", 0).0);
    assert_eq!(model.operators().iter().filter(|operator| **operator == "GatherBlockQuantized").count(), 2);
}

#[test]
fn progress_grows_to_its_total() {
    let source = tempfile::NamedTempFile::new().unwrap();
    fs::write(source.path(), tiny(Q4_1, Q8_0).bytes()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut seen = Vec::new();
    import_gguf(source.path(), folder.path(), Form::Exact, &mut |done, total| seen.push((done, total))).unwrap();
    assert!(seen.len() > 10 && seen.windows(2).all(|pair| pair[0].0 <= pair[1].0 && pair[0].1 == pair[1].1));
    assert!(seen.iter().all(|(done, total)| done <= total) && seen.last().is_some_and(|(done, total)| done == total));
}

#[test]
fn the_tokenizer_cuts_merges_and_knows_its_own_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let mut file = tiny(Q4_1, Q8_0);
    import_into(&file, folder.path(), Form::Exact).unwrap();
    let load = || tokenizers::Tokenizer::from_file(folder.path().join("tokenizer.json")).unwrap();
    let tokenizer = load();
    let encoded = tokenizer.encode("<|start|>hello 12<|end|>", true).unwrap();
    assert_eq!(encoded.get_tokens(), ["<|start|>", "hel", "l", "o", "Ġ", "1", "2", "<|end|>"]);
    assert_eq!(tokenizer.decode(encoded.get_ids(), false).unwrap(), "<|start|>hello 12<|end|>");
    assert_eq!(tokenizer.decode(encoded.get_ids(), true).unwrap(), "hello 12");
    // A model that begins texts with a token of its own; other ways to cut.
    for pre in ["gpt-2", "llama-bpe", "qwen2", "default", "smollm"] {
        file.key("tokenizer.ggml.add_bos_token", 7, &[1]).string("tokenizer.ggml.pre", pre);
        import_into(&file, folder.path(), Form::Exact).unwrap();
        let tokenizer = load();
        assert_eq!(tokenizer.encode("hello", true).unwrap().get_tokens(), ["<|start|>", "hel", "l", "o"], "{pre}");
        let text = "it's  naïve:\n\n 1234 äöü 日本";
        let ids = tokenizer.encode(text, false).unwrap();
        assert_eq!(tokenizer.decode(ids.get_ids(), false).unwrap(), text, "{pre}");
    }
}

#[test]
fn the_configuration_says_what_the_file_says() {
    let folder = tempfile::tempdir().unwrap();
    import_into(&tiny(Q4_1, Q8_0), folder.path(), Form::Exact).unwrap();
    let read = |name: &str| -> serde_json::Value { serde_json::from_slice(&fs::read(folder.path().join(name)).unwrap()).unwrap() };
    let config = read("config.json");
    assert_eq!((&config["num_key_value_heads"], &config["max_position_embeddings"]), (&2.into(), &64.into()));
    assert_eq!(read("generation_config.json")["eos_token_id"], serde_json::json!([0]));
    let tokenizer = read("tokenizer_config.json");
    assert_eq!(tokenizer["chat_template"], "{{ messages }}");
    assert_eq!((&tokenizer["bos_token"], &tokenizer["eos_token"]), (&"<|start|>".into(), &"<|end|>".into()));
    assert_eq!(read("genai_config.json")["model"]["decoder"]["num_hidden_layers"], 2);
}

#[test]
fn what_cannot_be_imported_is_named() {
    let refused = |change: &dyn Fn(&mut File)| {
        let mut file = tiny(Q4_1, Q8_0);
        change(&mut file);
        let folder = tempfile::tempdir().unwrap();
        let error = import_into(&file, folder.path(), Form::Exact).unwrap_err();
        assert!(!folder.path().join(MANIFEST).exists());
        let text = error.to_string();
        assert!(text.contains("\nhint: "), "{text}");
        text
    };
    assert!(refused(&|file| _ = file.string("general.architecture", "gemma3")).contains("architecture gemma3"));
    assert!(refused(&|file| file.keys.retain(|(key, _)| key != "general.architecture")).contains("general.architecture"));
    assert!(refused(&|file| file.keys.retain(|(key, _)| key != "llama.block_count")).contains("llama.block_count"));
    assert!(refused(&|file| _ = file.integer("llama.attention.head_count", 0)).contains("llama.attention.head_count"));
    assert!(refused(&|file| _ = file.integer("llama.attention.head_count_kv", 3)).contains("heads"));
    assert!(refused(&|file| _ = file.integer("llama.expert_count", 8)).contains("experts"));
    assert!(refused(&|file| _ = file.string("llama.rope.scaling.type", "yarn")).contains("yarn"));
    assert!(refused(&|file| _ = file.integer("llama.context_length", 2_000_000_000)).contains("2000000000 positions"));
    assert!(refused(&|file| _ = file.integer("llama.attention.key_length", 2_000_000_000)).contains("differ"));
    assert!(refused(&|file| _ = file.float("llama.attention.scale", 0.5)).contains("llama.attention.scale of 0.5"));
    assert!(refused(&|file| _ = file.string("general.architecture", "qwen2")).contains("qwen2.embedding_length"));
    assert!(refused(&|file| _ = file.string("tokenizer.ggml.model", "llama")).contains("tokenizer.ggml.scores"));
    assert!(refused(&|file| _ = file.string("tokenizer.ggml.model", "t5")).contains("model t5"));
    assert!(refused(&|file| _ = file.string("tokenizer.ggml.pre", "tekken")).contains("tekken"));
    assert!(refused(&|file| _ = file.strings("tokenizer.ggml.merges", &["he".to_owned()])).contains("merge"));
    assert!(refused(&|file| _ = file.strings("tokenizer.ggml.merges", &["q zz".to_owned()])).contains("tokenizer"));
    assert!(refused(&|file| _ = file.strings("tokenizer.ggml.tokens", &["a".to_owned(), "a".to_owned()])).contains("twice"));
    assert!(refused(&|file| file.tensors.retain(|(name, ..)| name != "blk.1.ffn_up.weight")).contains("no tensor blk.1.ffn_up.weight"));
    assert!(refused(&|file| _ = file.integer("llama.block_count", 2_000_000_000)).contains("no tensor blk.2.attn_norm.weight"));
    assert!(refused(&|file| _ = file.integer("llama.block_count", 1)).contains("blk.1."));
    assert!(refused(&|file| _ = file.integer("llama.feed_forward_length", 64)).contains("64 x 96"));
    assert!(refused(&|file| _ = file.tensor("blk.0.attn_q.bias", 1, 64, F32, &mut Numbers(3))).contains("blk.0.attn_q.bias"));
    let quantized = refused(&|file| {
        let place = file.tensors.iter_mut().find(|(name, ..)| name == "blk.0.ffn_down.weight").unwrap();
        (place.2, place.3) = (IQ2_XXS, vec![0; 64]);
    });
    assert!(quantized.contains("blk.0.ffn_down.weight") && quantized.contains("IQ2_XXS"));
    let infinite = refused(&|file| {
        let place = file.tensors.iter_mut().find(|(name, ..)| name == "blk.0.ffn_down.weight").unwrap();
        place.3[20..22].copy_from_slice(&half::f16::INFINITY.to_le_bytes());
    });
    assert!(infinite.contains("blk.0.ffn_down.weight") && infinite.contains("finite"));
}
