//! The ways in which omp starts a worker, and what each says in the options of `emberd worker`.
//!
//! omp knows nothing of emberd: it starts a program with the arguments and the environment that its own workers take. Which program was meant is told
//! by the arguments alone. Nothing is started here, and nothing is changed about the process; that is [`super::daemon`]'s part.

use std::ffi::{OsStr, OsString};

use crate::error::{Code, Error, Result};
use crate::models::table::{self, TABLE};

/// The argument by which omp's executable becomes its ONNX worker. What else the worker needs is in the environment.
pub const SELECTOR: &str = "__omp_worker_tiny_inference";

/// The options of omp's MLX worker, a Python script: all that a launch by arguments begins with, but for `-u SCRIPT`.
const MLX_OPTIONS: [&str; 6] = ["--socket", "--tag", "--model-key", "--repo", "--dir", "--idle-seconds"];

/// Which device omp's workers are to run on, and in which format they are to have their weights.
const DEVICE: &str = "PI_TINY_DEVICE";
const DTYPE: &str = "PI_TINY_DTYPE";

/// Values of `PI_TINY_DEVICE` that omp's workers take; `metal` is another word for `mlx`.
const DEVICES: [&str; 14] =
    ["auto", "coreml", "cpu", "cuda", "dml", "gpu", "metal", "mlx", "wasm", "webgpu", "webnn", "webnn-cpu", "webnn-gpu", "webnn-npu"];

/// Values of `PI_TINY_DTYPE` that omp's workers take.
const DTYPES: [&str; 13] = ["auto", "bnb4", "fp16", "fp32", "int8", "q1", "q1f16", "q2", "q2f16", "q4", "q4f16", "q8", "uint8"];

/// Whether omp has a local model of this key.
#[must_use]
pub fn is_key(key: &str) -> bool {
    table::find(key).is_some()
}

fn keys() -> Vec<&'static str> {
    TABLE.iter().map(|model| model.key).collect()
}

/// A start by omp, in emberd's words.
#[derive(Debug, PartialEq, Eq)]
pub struct Launch {
    /// The arguments of the `emberd` that is meant, without the program's name.
    pub arguments: Vec<OsString>,
    /// What was asked for and is not done, for the log.
    pub warnings: Vec<String>,
}

/// What these arguments mean when omp gave them; `None` when they are emberd's own. `variable` looks into the environment.
///
/// # Errors
/// When omp's own worker would not start either, in the same words: without a socket, a key and a tag, with a key, a device or a weight format that
/// does not exist; and when an option of the MLX form is unknown or has no value.
pub fn read(arguments: &[OsString], variable: impl Fn(&str) -> Option<OsString>) -> Result<Option<Launch>> {
    if arguments.iter().any(|argument| argument == SELECTOR) {
        return from_environment(variable).map(Some);
    }
    match arguments {
        [first, rest @ ..] if first == "-u" => {
            // After it stands the script that Python would have run.
            let options = if rest.first().is_some_and(|script| option(script).is_none()) { &rest[1..] } else { rest };
            from_options(options).map(Some)
        }
        [first, ..] if option(first).is_some() => from_options(arguments).map(Some),
        _ => Ok(None),
    }
}

fn from_environment(variable: impl Fn(&str) -> Option<OsString>) -> Result<Launch> {
    let given = |name: &str| variable(name).filter(|value| !value.is_empty());
    let names = ["OMP_TINY_WORKER_SOCKET", "OMP_TINY_WORKER_MODEL", "OMP_TINY_WORKER_TAG"];
    let [Some(socket), Some(key), Some(tag)] = names.map(given) else {
        let missing: Vec<&str> = names.into_iter().filter(|name| given(name).is_none()).collect();
        return Err(Error::new(Code::InvalidValue, "tiny worker environment is incomplete").hint(format!("set {}", missing.join(", "))));
    };
    if !key.to_str().is_some_and(is_key) {
        let error = Error::new(Code::InvalidValue, format!("Unknown tiny local model: {}", key.display()));
        return Err(error.hint(format!("the keys are {}", keys().join(", "))));
    }
    let given = |name| setting(name, &variable(name).unwrap_or_default().to_string_lossy());
    let warnings = match (given(DEVICE)?, given(DTYPE)?) {
        (Some(device), _) if !["auto", "cpu"].contains(&device.as_str()) => {
            vec![format!("{DEVICE} asks for {device}; the model runs on the CPU")]
        }
        _ => Vec::new(),
    };
    Ok(Launch { arguments: worker([("--socket", socket), ("--model-key", key), ("--tag", tag)]), warnings })
}

/// `PI_TINY_DEVICE` or `PI_TINY_DTYPE`, by its name, in order: one of the words that omp's workers take, in any case and with blanks around it. Empty and
/// `default` are as good as unset.
///
/// # Errors
/// When it is no such word, as omp's own worker says it.
pub fn setting(name: &str, given: &str) -> Result<Option<String>> {
    let words = if name == DEVICE { &DEVICES[..] } else { &DTYPES[..] };
    let word = given.trim().to_lowercase();
    if word.is_empty() || word == "default" {
        return Ok(None);
    }
    if !words.contains(&word.as_str()) {
        return Err(Error::new(Code::InvalidValue, format!("Unsupported {name}={}", serde_json::Value::from(given)))
            .hint(format!("unset it, or use one of {}", words.join(", "))));
    }
    Ok(Some(word))
}

/// The name of an MLX option, and the value where it is part of the argument.
fn option(argument: &OsStr) -> Option<(&'static str, Option<&OsStr>)> {
    MLX_OPTIONS.iter().find_map(|name| {
        let value = argument.as_encoded_bytes().strip_prefix(name.as_bytes())?;
        match value {
            [] => Some((*name, None)),
            // A part of an argument is one where it is text.
            [b'=', ..] => argument.to_str().map(|text| (*name, Some(OsStr::new(&text[name.len() + 1..])))),
            _ => None,
        }
    })
}

fn from_options(arguments: &[OsString]) -> Result<Launch> {
    let mut values: [Option<OsString>; MLX_OPTIONS.len()] = Default::default();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let Some((name, value)) = option(argument) else {
            return Err(Error::new(Code::InvalidValue, format!("unknown option of an MLX worker: {}", argument.display()))
                .hint(format!("the options are {}", MLX_OPTIONS.join(", "))));
        };
        let value = match value {
            Some(value) => value.to_owned(),
            None => rest.next().cloned().ok_or_else(|| Error::new(Code::InvalidValue, format!("{name} has no value")))?,
        };
        for (at, known) in MLX_OPTIONS.iter().enumerate() {
            if *known == name {
                values[at] = Some(value.clone());
            }
        }
    }
    let [socket, tag, key, repo, dir, seconds] = values;
    let (Some(socket), Some(tag), Some(key)) = (socket, tag, key) else {
        return Err(Error::new(Code::InvalidValue, "an MLX worker needs --socket, --tag and --model-key"));
    };
    let idle = seconds.map(|seconds| milliseconds(&seconds)).transpose()?;
    let needed = [("--socket", socket), ("--model-key", key), ("--tag", tag)];
    let more = [("--repo", repo), ("--dir", dir), ("--idle-ms", idle)];
    let more = more.into_iter().filter_map(|(name, value)| value.map(|value| (name, value)));
    Ok(Launch { arguments: worker(needed.into_iter().chain(more)), warnings: Vec::new() })
}

/// Seconds, with or without a fraction, as whole milliseconds. No wait is so short that it becomes zero, which would mean the default.
fn milliseconds(seconds: &OsStr) -> Result<OsString> {
    match seconds.to_str().and_then(|text| text.trim().parse::<f64>().ok()) {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Positive; what is longer than numbers go is the longest.
        Some(number) if number > 0.0 => Ok(((number * 1000.0).round().max(1.0) as u64).to_string().into()),
        Some(0.0) => Ok("0".into()),
        _ => Err(Error::new(Code::InvalidValue, format!("--idle-seconds is {}, not a number of seconds", seconds.display()))
            .hint("give a number that is not negative")),
    }
}

/// `emberd worker` with these options, started by a program that goes its own way.
fn worker(options: impl IntoIterator<Item = (&'static str, OsString)>) -> Vec<OsString> {
    let start = ["worker", "--detached"].map(OsString::from);
    let options = options.into_iter().map(|(name, value)| {
        let mut argument = OsString::from(name);
        argument.push("="); // A value may begin with a dash.
        argument.push(value);
        argument
    });
    start.into_iter().chain(options).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: [(&str, &str); 3] =
        [("OMP_TINY_WORKER_SOCKET", "/r/s.sock"), ("OMP_TINY_WORKER_MODEL", "lfm2.5-230m"), ("OMP_TINY_WORKER_TAG", "18.2.3|onnx||")];

    fn read(arguments: &[&str], variables: &[(&str, &str)]) -> Result<Option<Launch>> {
        let arguments: Vec<OsString> = arguments.iter().map(OsString::from).collect();
        super::read(&arguments, |name| variables.iter().rev().find(|(known, _)| *known == name).map(|(_, value)| value.into()))
    }

    fn options(arguments: &[&str], variables: &[(&str, &str)]) -> Vec<String> {
        let launch = read(arguments, variables).unwrap().expect("a launch by omp");
        launch.arguments.into_iter().map(|argument| argument.into_string().unwrap()).collect()
    }

    fn refusal(arguments: &[&str], variables: &[(&str, &str)]) -> String {
        read(arguments, variables).unwrap_err().message.into_owned()
    }

    #[test]
    fn emberds_own_arguments_are_left_alone() {
        for arguments in [&[][..], &["worker", "--socket", "s"], &["--log", "debug", "worker"], &["chat", "-u"], &["--help"]] {
            assert_eq!(read(arguments, &WHOLE), Ok(None), "{arguments:?}");
        }
    }

    #[test]
    fn the_selector_takes_everything_from_the_environment_wherever_it_stands() {
        let expected = ["worker", "--detached", "--socket=/r/s.sock", "--model-key=lfm2.5-230m", "--tag=18.2.3|onnx||"];
        for arguments in [&[SELECTOR][..], &["/omp/cli.js", SELECTOR], &["worker", SELECTOR], &[SELECTOR, "more"]] {
            assert_eq!(options(arguments, &WHOLE), expected, "{arguments:?}");
        }
    }

    #[test]
    fn an_environment_that_lacks_anything_is_refused() {
        for at in 0..3 {
            let mut variables = WHOLE;
            variables[at].1 = "";
            assert_eq!(refusal(&[SELECTOR], &variables), "tiny worker environment is incomplete");
            let hint = read(&[SELECTOR], &variables).unwrap_err().hint.unwrap();
            assert_eq!(hint, format!("set {}", variables[at].0));
        }
    }

    #[test]
    fn a_key_that_omp_has_not_is_refused_and_each_that_it_has_is_taken() {
        for key in keys() {
            let with = [WHOLE[0], WHOLE[2], ("OMP_TINY_WORKER_MODEL", key)];
            assert!(options(&[SELECTOR], &with).contains(&format!("--model-key={key}")));
        }
        let with = [WHOLE[0], WHOLE[2], ("OMP_TINY_WORKER_MODEL", "lfm9")];
        assert_eq!(refusal(&[SELECTOR], &with), "Unknown tiny local model: lfm9");
    }

    #[test]
    fn devices_and_weight_formats_are_checked_as_omp_checks_them() {
        let with = |name: &'static str, value: &'static str| [WHOLE[0], WHOLE[1], WHOLE[2], (name, value)];
        for (name, words) in [("PI_TINY_DEVICE", &DEVICES[..]), ("PI_TINY_DTYPE", &DTYPES[..])] {
            for word in words {
                assert!(read(&[SELECTOR], &with(name, word)).is_ok(), "{name}={word}");
            }
            for nothing in ["", "  ", "default", " Default "] {
                let launch = read(&[SELECTOR], &with(name, nothing)).unwrap().unwrap();
                assert!(launch.warnings.is_empty(), "{name}={nothing:?}");
            }
            assert_eq!(refusal(&[SELECTOR], &with(name, " bo\"gus")), format!("Unsupported {name}=\" bo\\\"gus\""));
        }
        let loud = read(&[SELECTOR], &with("PI_TINY_DEVICE", " CUDA ")).unwrap().unwrap();
        assert_eq!(loud.warnings, ["PI_TINY_DEVICE asks for cuda; the model runs on the CPU"]);
    }

    const MLX: [&str; 14] = [
        "-u",
        "/tmp/omp-tiny-mlx/runner-1.py",
        "--socket",
        "/r/k-mlx.sock",
        "--tag",
        "mlx|0.31.3|634ed9e0",
        "--model-key",
        "lfm2.5-230m",
        "--repo",
        "LiquidAI/LFM2.5-230M-MLX-4bit",
        "--dir",
        "/c/mlx/LiquidAI--LFM2.5-230M-MLX-4bit",
        "--idle-seconds",
        "0.5",
    ];

    #[test]
    fn the_mlx_form_is_taken_with_and_without_its_script() {
        let expected = [
            "worker",
            "--detached",
            "--socket=/r/k-mlx.sock",
            "--model-key=lfm2.5-230m",
            "--tag=mlx|0.31.3|634ed9e0",
            "--repo=LiquidAI/LFM2.5-230M-MLX-4bit",
            "--dir=/c/mlx/LiquidAI--LFM2.5-230M-MLX-4bit",
            "--idle-ms=500",
        ];
        assert_eq!(options(&MLX, &[]), expected);
        assert_eq!(options(&MLX[2..], &[]), expected);
        let joined = ["--socket=/r/s", "--tag=-t=1", "--model-key=any:key"];
        assert_eq!(options(&joined, &[]), ["worker", "--detached", "--socket=/r/s", "--model-key=any:key", "--tag=-t=1"]);
    }

    #[test]
    fn an_mlx_form_that_lacks_something_is_refused() {
        for gone in [2, 4, 6] {
            let mut arguments = MLX.to_vec();
            arguments.drain(gone..gone + 2);
            assert_eq!(refusal(&arguments, &[]), "an MLX worker needs --socket, --tag and --model-key");
        }
        assert_eq!(refusal(&MLX[..13], &[]), "--idle-seconds has no value");
        assert_eq!(refusal(&["--socket", "s", "--speed", "9"], &[]), "unknown option of an MLX worker: --speed");
        assert_eq!(refusal(&["-u"], &[]), "an MLX worker needs --socket, --tag and --model-key");
    }

    #[test]
    fn seconds_become_milliseconds() {
        let idle = |seconds: &str| milliseconds(OsStr::new(seconds)).map(|text| text.into_string().unwrap());
        let taken = [("900", "900000"), ("2.5", "2500"), ("0.0001", "1"), ("1e3", "1000000"), ("0", "0"), ("inf", "18446744073709551615")];
        for (seconds, expected) in taken {
            assert_eq!(idle(seconds).as_deref(), Ok(expected), "{seconds}");
        }
        for nonsense in ["", "soon", "-1", "NaN"] {
            assert!(idle(nonsense).unwrap_err().message.contains("--idle-seconds is"), "{nonsense:?}");
        }
    }
}
