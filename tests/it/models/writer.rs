//! Writes GGUF files for tests: whatever is asked for, right or wrong, and a tiny llama that is right.

use half::f16;

/// Numbers of ggml's tensor types.
pub(crate) const F32: u32 = 0;
pub(crate) const F16: u32 = 1;
pub(crate) const Q4_0: u32 = 2;
pub(crate) const Q4_1: u32 = 3;
pub(crate) const Q8_0: u32 = 8;
pub(crate) const IQ2_XXS: u32 = 16;
pub(crate) const BF16: u32 = 30;

/// A file in the making.
#[derive(Clone)]
pub(crate) struct File {
    pub(crate) version: u32,
    pub(crate) alignment: usize,
    pub(crate) keys: Vec<(String, Vec<u8>)>,
    pub(crate) tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
}

pub(crate) fn text(value: &str) -> Vec<u8> {
    [&(value.len() as u64).to_le_bytes()[..], value.as_bytes()].concat()
}

impl File {
    pub(crate) fn new() -> Self {
        Self { version: 3, alignment: 32, keys: Vec::new(), tensors: Vec::new() }
    }

    /// Sets a key to raw bytes: the value's type and then the value.
    pub(crate) fn key(&mut self, key: &str, kind: u32, value: &[u8]) -> &mut Self {
        self.keys.retain(|(name, _)| name != key);
        self.keys.push((key.to_owned(), [&kind.to_le_bytes()[..], value].concat()));
        self
    }

    pub(crate) fn integer(&mut self, key: &str, value: u32) -> &mut Self {
        self.key(key, 4, &value.to_le_bytes())
    }

    pub(crate) fn float(&mut self, key: &str, value: f32) -> &mut Self {
        self.key(key, 6, &value.to_le_bytes())
    }

    pub(crate) fn string(&mut self, key: &str, value: &str) -> &mut Self {
        self.key(key, 8, &text(value))
    }

    pub(crate) fn strings(&mut self, key: &str, values: &[String]) -> &mut Self {
        let body: Vec<u8> = values.iter().flat_map(|value| text(value)).collect();
        let head = [&8_u32.to_le_bytes()[..], &(values.len() as u64).to_le_bytes()].concat();
        self.key(key, 9, &[head, body].concat())
    }

    pub(crate) fn floats(&mut self, key: &str, values: &[f32]) -> &mut Self {
        let body: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let head = [&6_u32.to_le_bytes()[..], &(values.len() as u64).to_le_bytes()].concat();
        self.key(key, 9, &[head, body].concat())
    }

    pub(crate) fn integers(&mut self, key: &str, values: &[i32]) -> &mut Self {
        let body: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let head = [&5_u32.to_le_bytes()[..], &(values.len() as u64).to_le_bytes()].concat();
        self.key(key, 9, &[head, body].concat())
    }

    /// Adds a tensor of `rows x columns` whose values `numbers` draws.
    pub(crate) fn tensor(&mut self, name: &str, rows: usize, columns: usize, kind: u32, numbers: &mut Numbers) -> &mut Self {
        let dims = if rows == 1 { vec![columns as u64] } else { vec![columns as u64, rows as u64] };
        self.tensors.push((name.to_owned(), dims, kind, numbers.tensor(kind, rows * columns)));
        self
    }

    /// The file's bytes. The last tensor ends where the file ends.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            out.extend(text(key));
            out.extend(value);
        }
        let mut offset = 0;
        for (name, dims, kind, data) in &self.tensors {
            out.extend(text(name));
            out.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|size| out.extend(size.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset = (offset + data.len()).next_multiple_of(self.alignment);
        }
        for (_, _, _, data) in &self.tensors {
            out.resize(out.len().next_multiple_of(self.alignment), 0);
            out.extend(data);
        }
        out
    }
}

/// A small generator of numbers, the same in every run.
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn next(&mut self) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Between -1 and 1.
    pub(crate) fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn tensor(&mut self, kind: u32, count: usize) -> Vec<u8> {
        let half = |value: f32| f16::from_f32(value).to_le_bytes();
        let mut out = Vec::new();
        match kind {
            F32 => (0..count).for_each(|_| out.extend(self.float().to_le_bytes())),
            F16 => (0..count).for_each(|_| out.extend(half(self.float()))),
            BF16 => (0..count).for_each(|_| out.extend(half::bf16::from_f32(self.float()).to_le_bytes())),
            _ => {
                for _ in 0..count / 32 {
                    out.extend(half(0.01 + 0.02 * self.float().abs()));
                    if kind == Q4_1 {
                        out.extend(half(0.3 * self.float()));
                    }
                    out.extend((0..if kind == Q8_0 { 32 } else { 16 }).map(|_| self.next() as u8));
                }
            }
        }
        out
    }
}

/// Shape of [`tiny`]: two layers, 4 query heads over 2 key heads of 16, 64 wide, 96 inside, 300 tokens.
pub(crate) const TINY: (usize, usize, usize, usize, usize, usize, usize) = (2, 4, 2, 16, 64, 96, 300);

/// A tiny llama whose matrices are stored as `kind` and whose embedding is stored as `embedding`.
pub(crate) fn tiny(kind: u32, embedding: u32) -> File {
    let (layers, heads, kv_heads, head_dim, width, inner, vocab) = TINY;
    let mut numbers = Numbers(7);
    let mut file = File::new();
    file.string("general.architecture", "llama").string("general.name", "tiny");
    for (key, value) in [
        ("block_count", layers),
        ("context_length", 64),
        ("embedding_length", width),
        ("feed_forward_length", inner),
        ("attention.head_count", heads),
        ("attention.head_count_kv", kv_heads),
        ("rope.dimension_count", head_dim),
    ] {
        file.integer(&format!("llama.{key}"), value as u32);
    }
    file.float("llama.rope.freq_base", 10_000.0).float("llama.attention.layer_norm_rms_epsilon", 1e-5);

    // The 256 bytes in the notation of byte-level BPE, two merges, and tokens of its own kind.
    let mut tokens: Vec<String> = ["<|end|>", "<|start|>"].map(str::to_owned).to_vec();
    let printable = |byte: &u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let others = (0..256_u32).filter(|byte| !printable(byte)).count() as u32;
    tokens.extend((0..256).filter(printable).chain(256..256 + others).filter_map(char::from_u32).map(String::from));
    tokens.extend(["he", "hel"].map(str::to_owned));
    tokens.extend((tokens.len()..vocab).map(|id| format!("<|spare {id}|>")));
    let types: Vec<i32> = (0..vocab).map(|id| if !(2..260).contains(&id) { 3 } else { 1 }).collect();
    file.string("tokenizer.ggml.model", "gpt2").string("tokenizer.ggml.pre", "smollm");
    file.strings("tokenizer.ggml.tokens", &tokens).integers("tokenizer.ggml.token_type", &types);
    file.strings("tokenizer.ggml.merges", &["h e".to_owned(), "he l".to_owned()]);
    file.integer("tokenizer.ggml.eos_token_id", 0).integer("tokenizer.ggml.bos_token_id", 1);
    file.string("tokenizer.chat_template", "{{ messages }}");

    file.tensor("token_embd.weight", vocab, width, embedding, &mut numbers);
    for layer in 0..layers {
        let (queries, keys) = (heads * head_dim, kv_heads * head_dim);
        for (part, rows, columns, kind) in [
            ("attn_norm", 1, width, F32),
            ("attn_q", queries, width, kind),
            ("attn_k", keys, width, kind),
            ("attn_v", keys, width, kind),
            ("attn_output", width, queries, kind),
            ("ffn_norm", 1, width, F32),
            ("ffn_gate", inner, width, kind),
            ("ffn_up", inner, width, kind),
            ("ffn_down", width, inner, kind),
        ] {
            file.tensor(&format!("blk.{layer}.{part}.weight"), rows, columns, kind, &mut numbers);
        }
    }
    file.tensor("output_norm.weight", 1, width, F32, &mut numbers);
    file
}
