//! The ways in which ggml stores a tensor's elements: numbers, names, sizes, and what a quantized type's codes mean.
//!
//! How the bytes of a block are taken apart is `blocks`' and `superblocks`' business.
//!
//! Source: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>

/// How a tensor's elements are stored. Types that the importer does not read keep their number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// 32-bit floats.
    F32,
    /// 16-bit IEEE floats.
    F16,
    /// 16-bit brain floats.
    Bf16,
    /// Blocks of 32: an f16 scale and 32 four-bit codes, `w = d * (q - 8)`.
    Q4_0,
    /// Blocks of 32: an f16 scale, an f16 minimum and 32 four-bit codes, `w = d * q + m`.
    Q4_1,
    /// Blocks of 32: an f16 scale and 32 five-bit codes, `w = d * (q - 16)`.
    Q5_0,
    /// Blocks of 32: an f16 scale, an f16 minimum and 32 five-bit codes, `w = d * q + m`.
    Q5_1,
    /// Blocks of 32: an f16 scale and 32 signed bytes, `w = d * q`.
    Q8_0,
    /// Super-blocks of 256 with 16 blocks of two-bit codes, `w = d * s * q - e * m` with four-bit `s` and `m`.
    Q2K,
    /// Super-blocks of 256 with 16 blocks of three-bit codes, `w = d * s * (q - 4)` with a six-bit `s`.
    Q3K,
    /// Super-blocks of 256 with 8 blocks of four-bit codes, `w = d * s * q - e * m` with six-bit `s` and `m`.
    Q4K,
    /// Super-blocks of 256 with 8 blocks of five-bit codes, `w = d * s * q - e * m` with six-bit `s` and `m`.
    Q5K,
    /// Super-blocks of 256 with 16 blocks of six-bit codes, `w = d * s * (q - 32)` with an eight-bit `s`.
    Q6K,
    /// Blocks of 32: an f16 scale and 32 four-bit indices into a table of 16 signed bytes, `w = d * t[q]`.
    Iq4Nl,
    /// Super-blocks of 256 with 8 blocks of indices into the same table, `w = d * s * t[q]` with a six-bit `s`.
    Iq4Xs,
    /// A type that is known by number only.
    Other(u32),
}

/// Names of ggml's tensor types by number; gaps are numbers that were retired.
const NAMES: [&str; 40] = [
    "F32",
    "F16",
    "Q4_0",
    "Q4_1",
    "Q4_2",
    "Q4_3",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q8_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "Q8_K",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ3_XXS",
    "IQ1_S",
    "IQ4_NL",
    "IQ3_S",
    "IQ2_S",
    "IQ4_XS",
    "I8",
    "I16",
    "I32",
    "I64",
    "F64",
    "IQ1_M",
    "BF16",
    "Q4_0_4_4",
    "Q4_0_4_8",
    "Q4_0_8_8",
    "TQ1_0",
    "TQ2_0",
    "IQ4_NL_4_4",
    "IQ4_NL_4_8",
    "IQ4_NL_8_8",
    "MXFP4",
];

/// What the codes of a quantized type mean: `w = scale * code + minimum`, with a scale and a minimum for each block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Coding {
    /// Bits that hold a code: 4 or 8.
    pub bits: usize,
    /// Elements that share a scale: 16 or 32.
    pub block: usize,
    /// The code that stands for 0 in every block; `None` where each block has a minimum of its own.
    pub zero: Option<u8>,
    /// Bits that codes leave free, where blocks have minimums: multiplied by two to the power of it, codes are as many times finer.
    pub spare: u32,
}

impl Kind {
    /// Every type that is read.
    pub const READ: [Self; 15] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Iq4Nl,
        Self::Iq4Xs,
    ];

    /// The type of this number.
    pub fn from_number(number: u32) -> Self {
        Self::READ.into_iter().find(|kind| kind.number() == number).unwrap_or(Self::Other(number))
    }

    /// The type's number in the file.
    pub fn number(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q5_0 => 6,
            Self::Q5_1 => 7,
            Self::Q8_0 => 8,
            Self::Q2K => 10,
            Self::Q3K => 11,
            Self::Q4K => 12,
            Self::Q5K => 13,
            Self::Q6K => 14,
            Self::Iq4Nl => 20,
            Self::Iq4Xs => 23,
            Self::Bf16 => 30,
            Self::Other(number) => number,
        }
    }

    /// The type's name as ggml spells it, for messages.
    pub fn name(self) -> String {
        let number = self.number();
        match NAMES.get(number as usize) {
            Some(name) => (*name).to_owned(),
            None => format!("type {number}"),
        }
    }

    /// Elements in a block (of the outermost kind) and its size in bytes; `None` for a type that is not read.
    pub fn block(self) -> Option<(u64, u64)> {
        match self {
            Self::F32 => Some((1, 4)),
            Self::F16 | Self::Bf16 => Some((1, 2)),
            Self::Q4_0 | Self::Iq4Nl => Some((32, 18)),
            Self::Q4_1 => Some((32, 20)),
            Self::Q5_0 => Some((32, 22)),
            Self::Q5_1 => Some((32, 24)),
            Self::Q8_0 => Some((32, 34)),
            Self::Q2K => Some((256, 84)),
            Self::Q3K => Some((256, 110)),
            Self::Q4K => Some((256, 144)),
            Self::Q5K => Some((256, 176)),
            Self::Q6K => Some((256, 210)),
            Self::Iq4Xs => Some((256, 136)),
            Self::Other(_) => None,
        }
    }

    /// What the codes mean; `None` for floats, and for a type that is not read.
    pub fn coding(self) -> Option<Coding> {
        let coding = |bits, block, zero| Some(Coding { bits, block, zero, spare: 0 });
        let spare = |bits, block, spare| Some(Coding { bits, block, zero: None, spare });
        match self {
            Self::F32 | Self::F16 | Self::Bf16 | Self::Other(_) => None,
            Self::Q4_0 => coding(4, 32, Some(8)),
            Self::Q4_1 | Self::Q4K => coding(4, 32, None),
            Self::Q2K => spare(4, 16, 2),
            Self::Q3K => coding(4, 16, Some(4)),
            Self::Q5_1 | Self::Q5K => spare(8, 32, 3),
            // The codes of these are moved so that the middle of a byte stands for 0, which is what kernels take for granted.
            Self::Q5_0 | Self::Q8_0 | Self::Iq4Nl | Self::Iq4Xs => coding(8, 32, Some(128)),
            Self::Q6K => coding(8, 16, Some(128)),
        }
    }
}
