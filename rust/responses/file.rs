//! Files and images in a request: a text file becomes text, everything else is refused by name.
//!
//! Nothing is fetched: a file comes with the request, as a data URL (RFC 2397).

use std::borrow::Cow;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD};
use percent_encoding::percent_decode_str;

use super::validate::At;
use crate::error::Result;

/// Media types that are text although their name does not begin so.
const TEXTS: [&str; 10] = [
    "application/json",
    "application/jsonl",
    "application/x-ndjson",
    "application/xml",
    "application/yaml",
    "application/x-yaml",
    "application/toml",
    "application/javascript",
    "application/x-sh",
    "application/sql",
];
/// Ends of names that say so where the media type says nothing.
const NAMES: [&str; 10] = ["txt", "md", "markdown", "json", "jsonl", "csv", "tsv", "xml", "yaml", "yml"];
/// Media types that say nothing.
const UNTOLD: [&str; 2] = ["", "application/octet-stream"];

/// The text of a part of type `input_file`, under its name where it has one.
///
/// # Errors
/// `unsupported_parameter` at the field that holds what is not taken, `invalid_value` for data that is no text after all.
pub(super) fn text(part: &At<'_, '_>) -> Result<String> {
    for (key, what) in [("file_id", "is given: this server keeps no files"), ("file_url", "is given: this server fetches no files")] {
        if let Some(field) = part.get(key) {
            field.string()?;
            return Err(field.unsupported(what).hint("send a text file as a data URL in file_data"));
        }
    }
    let name = part.get("filename").map(|field| field.string()).transpose()?.unwrap_or_default();
    let data = match part.get("file_data") {
        Some(field) if !field.string()?.is_empty() => field,
        _ => {
            let kind = part.need("type")?;
            return Err(kind.unsupported("is \"input_file\" without file_data").hint("send a text file as a data URL in file_data"));
        }
    };
    let shown = |what: &str| format!("a data URL of text, such as data:text/plain;base64,…, and this {what}");
    let Some((kind, encoded)) = data.string()?.strip_prefix("data:").and_then(|url| url.split_once(',')) else {
        return Err(data.wrong(shown("is no data URL")));
    };
    let (kind, base64) = kind.strip_suffix(";base64").map_or((kind, false), |kind| (kind, true));
    let media = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if !is_text(&media, name) {
        let media = if media.is_empty() { "a file without a media type" } else { media.as_str() };
        return Err(data.unsupported(format_args!("is {media:?}: this server takes text files only")).hint("send its text"));
    }
    let bytes = if base64 { decoded(encoded) } else { Some(percent_decode_str(encoded).collect()) };
    let Some(bytes) = bytes else { return Err(data.wrong(shown("is not base64"))) };
    let Ok(text) = String::from_utf8(bytes) else { return Err(data.wrong(shown("is not UTF-8"))) };
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    Ok(if name.is_empty() { text.to_owned() } else { format!("{name}:\n{text}") })
}

/// Whether a file of this media type and name is text.
fn is_text(media: &str, name: &str) -> bool {
    let told = media.starts_with("text/") || TEXTS.contains(&media) || media.ends_with("+json") || media.ends_with("+xml");
    let named = name.rsplit_once('.').is_some_and(|(_, end)| NAMES.contains(&end.to_ascii_lowercase().as_str()));
    told || (UNTOLD.contains(&media) && named)
}

/// What base64 says, in either alphabet, padded or not. Line breaks and escapes of a URL are passed over.
fn decoded(text: &str) -> Option<Vec<u8>> {
    let text = percent_decode_str(text).decode_utf8().ok()?;
    let text: Cow<'_, str> = if text.contains(char::is_whitespace) { text.split_whitespace().collect::<String>().into() } else { text };
    [STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD].iter().find_map(|engine| engine.decode(text.as_bytes()).ok())
}
