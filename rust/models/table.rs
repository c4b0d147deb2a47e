//! The models that coding agents know by key: for each, the hub repository for either engine.
//!
//! The keys, groups and repositories are those of omp's registry of local models (18.3.4). Every key may be used for every purpose; the group says what
//! it was chosen for. No key is refused for an engine: whether a graph can be run is decided by the engine that opens it, which names what it lacks.

use crate::error::{Code, Error, Result};

/// What a model was chosen for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// Short titles: the smallest models.
    Title,
    /// Extracting and condensing what is worth remembering.
    Memory,
}

impl Group {
    /// How it is written in lists.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Title => "title",
            Self::Memory => "memory",
        }
    }
}

/// The form of a model's files: which repository of a key is meant, and which files of a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// An ONNX graph with its weights.
    Onnx,
    /// Safetensors for MLX.
    Mlx,
}

impl Form {
    /// The form that an engine takes, by the engine's name.
    #[must_use]
    pub fn of(engine: &str) -> Self {
        if engine == "mlx" { Self::Mlx } else { Self::Onnx }
    }

    /// How it is written on command lines.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Onnx => "onnx",
            Self::Mlx => "mlx",
        }
    }
}

/// A model that has a key.
#[derive(Debug, PartialEq, Eq)]
pub struct TinyModel {
    /// The key.
    pub key: &'static str,
    /// What it was chosen for.
    pub group: Group,
    /// The repository of its ONNX form.
    pub onnx: &'static str,
    /// The repository of its MLX form.
    pub mlx: &'static str,
    /// Whether it thinks before it answers unless it is told not to.
    pub reasoning: bool,
}

impl TinyModel {
    /// Its repository for an engine of this form.
    #[must_use]
    pub fn repo(&self, form: Form) -> &'static str {
        match form {
            Form::Onnx => self.onnx,
            Form::Mlx => self.mlx,
        }
    }
}

const fn row(key: &'static str, group: Group, onnx: &'static str, mlx: &'static str) -> TinyModel {
    TinyModel { key, group, onnx, mlx, reasoning: false }
}

/// All keys.
pub const TABLE: &[TinyModel] = &[
    row("lfm2.5-230m", Group::Title, "LiquidAI/LFM2.5-230M-ONNX", "LiquidAI/LFM2.5-230M-MLX-4bit"),
    row("lfm2.5-350m", Group::Title, "onnx-community/LFM2.5-350M-ONNX", "LiquidAI/LFM2.5-350M-MLX-4bit"),
    row("falcon-h1-90m", Group::Title, "onnx-community/Falcon-H1-Tiny-90M-Instruct-ONNX", "mlx-community/Falcon-H1-Tiny-90M-Instruct-4bit"),
    TinyModel { reasoning: true, ..row("qwen3-1.7b", Group::Memory, "onnx-community/Qwen3-1.7B-ONNX", "mlx-community/Qwen3-1.7B-4bit") },
    row("llama3.2:3b", Group::Memory, "onnx-community/Llama-3.2-3B-Instruct-ONNX", "mlx-community/Llama-3.2-3B-Instruct-4bit"),
    row("gemma-3-1b", Group::Memory, "onnx-community/gemma-3-1b-it-ONNX", "mlx-community/gemma-3-1b-it-4bit"),
    row("qwen2.5-1.5b", Group::Memory, "onnx-community/Qwen2.5-1.5B-Instruct", "mlx-community/Qwen2.5-1.5B-Instruct-4bit"),
    row("lfm2-1.2b", Group::Memory, "onnx-community/LFM2-1.2B-ONNX", "mlx-community/LFM2-1.2B-4bit"),
];

/// The model with this key.
#[must_use]
pub fn find(key: &str) -> Option<&'static TinyModel> {
    TABLE.iter().find(|model| model.key == key)
}

/// Whether this is written as the name of a hub repository, `ORG/NAME`. The rules are the hub's: letters, digits, `-`, `_` and `.`, no `--` and `..`,
/// no `-` or `.` at either end of a part, 96 characters at most.
#[must_use]
pub fn is_repo(name: &str) -> bool {
    let part = |part: &str| {
        !part.is_empty()
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
            && !part.starts_with(['-', '.'])
            && !part.ends_with(['-', '.'])
    };
    let two = name.split_once('/').is_some_and(|(org, name)| part(org) && part(name));
    two && name.len() <= 96 && !name.contains("--") && !name.contains("..")
}

/// How the weights of an ONNX repository are stored, which is part of the graph's file name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dtype {
    name: &'static str,
    /// Whether somebody asked for it, so that no other will do.
    asked: bool,
}

impl Default for Dtype {
    /// Four bits, for want of a wish.
    fn default() -> Self {
        Self { name: "q4", asked: false }
    }
}

impl Dtype {
    /// The names there are. They, and the endings of [`Dtype::suffix`], are those of transformers.js.
    pub const NAMES: [&str; 12] = ["q4", "q4f16", "q8", "fp16", "fp32", "int8", "uint8", "bnb4", "q2", "q2f16", "q1", "q1f16"];

    /// The one with this name, in any case and with blanks around it; nothing, `default` and `auto` mean the default.
    ///
    /// # Errors
    /// `invalid_value` for any other name.
    pub fn named(name: &str) -> Result<Self> {
        let wanted = name.trim().to_ascii_lowercase();
        if matches!(wanted.as_str(), "" | "default" | "auto") {
            return Ok(Self::default());
        }
        Self::NAMES.into_iter().find(|name| *name == wanted).map(|name| Self { name, asked: true }).ok_or_else(|| {
            Error::new(Code::InvalidValue, format!("Unsupported PI_TINY_DTYPE={name}"))
                .hint(format!("the names are {} and default", Self::NAMES.join(", ")))
        })
    }

    /// The name.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.name
    }

    /// What follows `model` in the graph's file name.
    #[must_use]
    pub fn suffix(self) -> String {
        match self.name {
            "fp32" => String::new(),
            "q8" => "_quantized".to_owned(),
            name => format!("_{name}"),
        }
    }

    /// Where a model's graph may be within its folder, the best place first. A graph that says nothing of its weights (`model.onnx` at the root) will do
    /// where nobody asked for any in particular.
    #[must_use]
    pub fn graphs(self) -> Vec<String> {
        let suffix = self.suffix();
        let mut places = vec![format!("onnx/model{suffix}.onnx"), format!("model{suffix}.onnx")];
        if !self.asked {
            places.push("model.onnx".to_owned());
        }
        places
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_eight_keys_and_each_has_two_repositories() {
        let keys: Vec<_> = TABLE.iter().map(|model| model.key).collect();
        assert_eq!(
            keys,
            ["lfm2.5-230m", "lfm2.5-350m", "falcon-h1-90m", "qwen3-1.7b", "llama3.2:3b", "gemma-3-1b", "qwen2.5-1.5b", "lfm2-1.2b"]
        );
        for model in TABLE {
            assert_eq!(find(model.key), Some(model));
            assert!(is_repo(model.onnx) && is_repo(model.mlx) && model.onnx != model.mlx, "{model:?}");
        }
        assert_eq!(TABLE.iter().filter(|model| model.reasoning).map(|model| model.key).collect::<Vec<_>>(), ["qwen3-1.7b"]);
        assert_eq!(TABLE.iter().filter(|model| model.group == Group::Title).count(), 3);
        assert_eq!(find("lfm2.5-230m").map(|model| model.repo(Form::of("onnx"))), Some("LiquidAI/LFM2.5-230M-ONNX"));
        assert_eq!(find("lfm2.5-230m").map(|model| model.repo(Form::of("mlx"))), Some("LiquidAI/LFM2.5-230M-MLX-4bit"));
        assert_eq!(find("lfm2-350m"), None);
    }

    #[test]
    fn a_repository_is_written_as_the_hub_writes_it() {
        for name in ["a/b", "LiquidAI/LFM2.5-230M-ONNX", "o_o/n.a-m_e"] {
            assert!(is_repo(name), "{name}");
        }
        for name in [
            "", "a", "/a", "a/", "a/b/c", "./a", "../a", "a/..", "a/.b", "-a/b", "a/b-", "a--b/c", "a/b..c", "a b/c", "a\\b/c", "é/b",
            "~/b",
        ] {
            assert!(!is_repo(name), "{name}");
        }
        assert!(!is_repo(&format!("a/{}", "b".repeat(95))));
    }

    #[test]
    fn a_dtype_is_found_by_its_name_and_names_its_file() {
        for name in ["", "default", " AUTO ", "q4"] {
            assert_eq!(Dtype::named(name).map(Dtype::suffix), Ok("_q4".into()), "{name:?}");
        }
        assert_eq!(Dtype::named("fp32").map(|dtype| dtype.graphs()[0].clone()), Ok("onnx/model.onnx".into()));
        assert_eq!(Dtype::named("Q8").map(|dtype| dtype.graphs()[1].clone()), Ok("model_quantized.onnx".into()));
        assert_eq!(Dtype::default().graphs(), ["onnx/model_q4.onnx", "model_q4.onnx", "model.onnx"]);
        assert_eq!(Dtype::named("q4").map(Dtype::graphs), Ok(vec!["onnx/model_q4.onnx".into(), "model_q4.onnx".into()]));
        assert!(Dtype::named("q5").unwrap_err().message.contains("PI_TINY_DTYPE=q5"));
    }
}
