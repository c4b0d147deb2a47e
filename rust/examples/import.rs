//! Imports a GGUF file from the command line: `cargo run --release --example import -- MODEL.gguf FOLDER [exact|fast|fp32]`.
#![allow(clippy::print_stdout)]

use std::path::Path;

use emberd::models::import::{Form, import_gguf};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (gguf, into, form) = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [gguf, into] | [gguf, into, "exact"] => (gguf, into, Form::Exact),
        [gguf, into, "fast"] => (gguf, into, Form::Fast),
        [gguf, into, "fp32"] => (gguf, into, Form::Fp32),
        _ => return Err("usage: import MODEL.gguf FOLDER [exact|fast|fp32]".into()),
    };
    std::fs::create_dir_all(into)?;
    let started = std::time::Instant::now();
    let imported = import_gguf(Path::new(gguf), Path::new(into), form, &mut |_, _| {})?;
    for file in &imported.files {
        println!("{:>12} {} {}", file.bytes, &file.sha256[..12], file.name);
    }
    println!("{:.2} s", started.elapsed().as_secs_f64());
    Ok(())
}
