//! The GGUF reader: what is right is read back, what is wrong is refused, and nothing panics or takes memory it has no use for.

use std::collections::BTreeMap;
use std::io::Write;

use emberd::models::gguf::blocks::{dequantize, row_bytes};
use emberd::models::gguf::{Gguf, GgufError, Kind, Value};
use proptest::prelude::*;

use super::writer::{BF16, F16, F32, File, IQ2_XXS, Numbers, Q4_0, Q4_1, Q8_0, text, tiny};

fn open(bytes: &[u8]) -> Result<Gguf, GgufError> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    Gguf::open(file.path())
}

#[test]
fn metadata_is_read_back() {
    for version in [2, 3] {
        let mut file = File::new();
        file.version = version;
        file.string("text", "größe").integer("count", 7).float("ratio", 0.5);
        file.strings("words", &["a".to_owned(), String::new()]).integers("numbers", &[-1, 2]);
        file.key("flag", 7, &[1]).key("negative", 11, &(-5_i64).to_le_bytes()).key("double", 12, &2.5_f64.to_le_bytes());
        let gguf = open(&file.bytes()).unwrap();
        assert_eq!(gguf.text("text"), Some("größe"));
        assert_eq!(gguf.integer("count"), Some(7));
        assert_eq!(gguf.integer("flag"), Some(1));
        assert_eq!(gguf.float("ratio"), Some(0.5));
        assert_eq!(gguf.float("double"), Some(2.5));
        assert_eq!(gguf.value("negative"), Some(&Value::Int(-5)));
        assert_eq!(gguf.integer("negative"), None);
        assert_eq!(gguf.texts("words"), Some(&["a".to_owned(), String::new()][..]));
        assert_eq!(gguf.integers("numbers"), Some(&[-1, 2][..]));
        assert_eq!(gguf.text("absent"), None);
    }
}

#[test]
fn every_type_is_dequantized_as_its_definition_says() {
    // One block each: scale 0.5, minimum -1, codes 0 to 15 in the low nibbles and their complements in the high ones.
    let nibbles: Vec<u8> = (0..16).map(|code| code | (15 - code) << 4).collect();
    let half = |value: f32| half::f16::from_f32(value).to_le_bytes().to_vec();
    let q4_0 = [half(0.5), nibbles.clone()].concat();
    let q4_1 = [half(0.5), half(-1.0), nibbles].concat();
    let q8_0 = [half(0.5), (0..32).map(|code: i8| (code - 16).cast_unsigned()).collect()].concat();
    let codes: Vec<f32> = (0..16).chain((0..16).rev()).map(|code| code as f32).collect();
    let cases = [
        (Kind::Q4_0, q4_0, codes.iter().map(|code| 0.5 * (code - 8.0)).collect::<Vec<f32>>()),
        (Kind::Q4_1, q4_1, codes.iter().map(|code| 0.5 * code - 1.0).collect()),
        (Kind::Q8_0, q8_0, (0..32).map(|code| 0.5 * (code as f32 - 16.0)).collect()),
        (Kind::F32, 1.5_f32.to_le_bytes().to_vec(), vec![1.5]),
        (Kind::F16, half(-0.25), vec![-0.25]),
        (Kind::Bf16, half::bf16::from_f32(3.0).to_le_bytes().to_vec(), vec![3.0]),
    ];
    for (kind, bytes, expected) in cases {
        let mut values = Vec::new();
        dequantize(kind, &bytes, &mut values);
        assert_eq!(values, expected, "{}", kind.name());
    }
}

#[test]
fn every_quantized_type_is_dequantized_as_the_reference_does_bit_for_bit() {
    #[derive(serde::Deserialize)]
    struct Golden {
        number: u32,
        blocks: String,
        values: String,
    }
    let bytes =
        |text: &str| -> Vec<u8> { (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect() };
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/blocks.json");
    let golden: BTreeMap<String, Golden> = serde_json::from_str(&std::fs::read_to_string(golden).unwrap()).unwrap();
    let mut left: Vec<Kind> = Kind::READ.into_iter().filter(|kind| kind.coding().is_some()).collect();
    for (name, Golden { number, blocks, values }) in golden {
        let kind = Kind::from_number(number);
        assert_eq!(kind.name(), name);
        left.retain(|other| *other != kind);
        let (blocks, mut found) = (bytes(&blocks), Vec::new());
        // As rows of one block and as one row: where a row ends must not matter.
        let size = row_bytes(kind, kind.block().unwrap().0 as usize);
        blocks.chunks(size).for_each(|block| dequantize(kind, block, &mut found));
        let mut at_once = Vec::new();
        dequantize(kind, &blocks, &mut at_once);
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        let expected: Vec<u32> = bytes(&values).as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        assert_eq!(bits(&found), expected, "{name}");
        assert_eq!(bits(&at_once), expected, "{name}");
    }
    assert_eq!(left, [], "types that are read and have no golden blocks");
}

#[test]
fn tensors_are_found_where_the_alignment_puts_them() {
    for alignment in [8, 32, 256] {
        let mut file = File::new();
        file.alignment = alignment;
        file.integer("general.alignment", alignment as u32);
        for (name, kind) in [("a", F32), ("b", F16), ("c", BF16), ("d", Q4_0), ("e", Q4_1), ("f", Q8_0)] {
            file.tensor(name, 3, 64, kind, &mut Numbers(u64::from(kind)));
        }
        let gguf = open(&file.bytes()).unwrap();
        for (name, _, _, data) in &file.tensors {
            let tensor = gguf.tensor(name).unwrap();
            assert_eq!((tensor.rows, tensor.columns), (3, 64));
            assert_eq!(gguf.data(tensor), data);
        }
    }
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let whole = tiny(Q4_1, Q8_0).bytes();
    open(&whole).unwrap();
    // Every cut within the tables' beginning, then cuts spread over the rest, and the last byte.
    let cuts = (0..600).chain((600..whole.len()).step_by(97)).chain([whole.len() - 1]);
    for cut in cuts {
        match open(&whole[..cut]) {
            Err(GgufError::Truncated { .. }) => assert!(cut >= 4, "cut at {cut}"),
            Err(GgufError::Magic { .. }) => assert!(cut < 4, "cut at {cut}"),
            other => panic!("cut at {cut}: {other:?}"),
        }
    }
}

#[test]
fn something_else_than_gguf_is_refused_by_its_first_bytes() {
    for bytes in [&b""[..], b"GG", b"PK\x03\x04 a wheel", b"version https://git-lfs.github.com/spec/v1"] {
        let error = open(bytes).unwrap_err();
        assert!(matches!(error, GgufError::Magic { .. }), "{error}");
        assert!(error.to_string().contains("hint: "));
    }
    assert!(matches!(Gguf::open("/nowhere/model.gguf".as_ref()), Err(GgufError::Io { .. })));
}

#[test]
fn other_versions_and_big_endian_files_are_refused() {
    for version in [0, 1, 4, 3_u32.swap_bytes()] {
        let mut file = File::new();
        file.version = version;
        assert!(matches!(open(&file.bytes()), Err(GgufError::Version { version: found }) if found == version));
    }
}

#[test]
fn counts_and_lengths_beyond_the_file_are_refused_before_memory_is_taken() {
    let huge = (1_u64 << 61).to_le_bytes();
    let all = u64::MAX.to_le_bytes();
    for count in [huge, all] {
        let mut bytes = tiny(Q4_0, Q8_0).bytes();
        bytes[8..16].copy_from_slice(&count);
        assert!(matches!(open(&bytes), Err(GgufError::Truncated { .. })), "tensor count");
        let mut bytes = tiny(Q4_0, Q8_0).bytes();
        bytes[16..24].copy_from_slice(&count);
        assert!(matches!(open(&bytes), Err(GgufError::Truncated { .. })), "metadata count");
        for kind in [0_u32, 5, 8, 12] {
            let mut file = File::new();
            file.key("array", 9, &[&kind.to_le_bytes()[..], &count].concat());
            assert!(matches!(open(&file.bytes()), Err(GgufError::Truncated { .. })), "array of type {kind}");
        }
        let mut file = File::new();
        file.key("string", 8, &count);
        assert!(matches!(open(&file.bytes()), Err(GgufError::Truncated { .. })), "string");
    }
}

#[test]
fn tables_that_contradict_themselves_are_refused() {
    let damaged = |change: &dyn Fn(&mut File)| {
        let mut file = File::new();
        file.tensor("a", 2, 32, Q8_0, &mut Numbers(1));
        change(&mut file);
        match open(&file.bytes()) {
            Err(GgufError::Damaged(what)) => what,
            other => panic!("{other:?}"),
        }
    };
    assert!(damaged(&|file| file.keys.extend([("k".into(), vec![7, 0, 0, 0, 1]), ("k".into(), vec![7, 0, 0, 0, 1])])).contains("twice"));
    assert!(damaged(&|file| file.tensors.push(file.tensors[0].clone())).contains("twice"));
    assert!(damaged(&|file| file.tensors[0].1 = vec![48, 2]).contains("whole blocks"));
    assert!(damaged(&|file| file.tensors[0].1 = vec![32, 0]).contains("empty"));
    assert!(damaged(&|file| file.tensors[0].1 = vec![32, u64::MAX, 2]).contains("larger"));
    assert!(damaged(&|file| file.tensors[0].1 = vec![1 << 40, 1 << 24]).contains("larger"));
    assert!(damaged(&|file| file.tensors[0].1 = vec![]).contains("0 dimensions"));
    assert!(damaged(&|file| file.tensors[0].1 = vec![32; 5]).contains("5 dimensions"));
    assert!(damaged(&|file| _ = file.integer("general.alignment", 0)).contains("alignment"));
    assert!(damaged(&|file| _ = file.integer("general.alignment", 24)).contains("alignment"));
    assert!(damaged(&|file| _ = file.key("k", 13, &[])).contains("value type 13"));
    assert!(damaged(&|file| _ = file.key("k", 7, &[2])).contains("boolean"));
    assert!(damaged(&|file| _ = file.key("k", 9, &[9, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0])).contains("array"));
    assert!(damaged(&|file| _ = file.key("k", 8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff])).contains("utf-8"));
}

#[test]
fn a_tensor_type_that_is_not_read_keeps_its_name() {
    let mut file = File::new();
    file.tensors.push(("a".to_owned(), vec![256], IQ2_XXS, vec![0; 66]));
    let gguf = open(&file.bytes()).unwrap();
    assert_eq!(gguf.tensor("a").unwrap().kind.name(), "IQ2_XXS");
    assert!(matches!(gguf.tensor("b"), Err(GgufError::Tensor(name)) if name == "b"));
    assert_eq!(Kind::Other(99).name(), "type 99");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever is changed in the tables, opening ends, and with no more memory than the file is long.
    #[test]
    fn altered_bytes_never_panic(changes in prop::collection::vec((0_usize..9_000, any::<u8>()), 1..6)) {
        let mut bytes = tiny(Q4_1, Q8_0).bytes();
        for (at, value) in changes {
            bytes[at] = value;
        }
        if let Ok(gguf) = open(&bytes) {
            for tensor in gguf.tensors().values() {
                prop_assert!(gguf.data(tensor).len() == tensor.bytes());
            }
        }
    }

    /// A table whose numbers are anything at all.
    #[test]
    fn arbitrary_tables_never_panic(kind in 0_u32..14, value in prop::collection::vec(any::<u8>(), 0..64)) {
        let mut file = File::new();
        file.key("k", kind, &value).key("after", 8, &text("x"));
        file.tensor("a", 1, 32, Q8_0, &mut Numbers(1));
        _ = open(&file.bytes());
    }
}
