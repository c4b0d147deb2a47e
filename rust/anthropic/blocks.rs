//! The blocks of a message as text, which is all that a model here reads: what else there is, is refused by its name.
//!
//! Blocks that are more than words of a message (uses of tools, their results, thoughts) are `conversation`'s.

use std::borrow::Cow;

use serde_json::Value;

use crate::error::Result;
use crate::responses::input::BETWEEN_PARTS;
use crate::responses::validate::At;

/// What a block is.
pub(super) fn kind<'v>(block: &At<'v, '_>) -> Result<&'v str> {
    block.object()?;
    block.need("type")?.string()
}

/// A text, or the text of blocks.
pub(super) fn text<'v>(content: &At<'v, '_>) -> Result<Cow<'v, str>> {
    text_of(content, words)
}

/// A text, or the text of blocks, each of which is read so.
fn text_of<'v>(content: &At<'v, '_>, read: impl Fn(&At<'v, '_>) -> Result<Cow<'v, str>>) -> Result<Cow<'v, str>> {
    if content.value.is_string() {
        return content.string().map(Cow::Borrowed);
    }
    if !content.value.is_array() {
        return Err(content.not("a string or an array of blocks"));
    }
    let texts = content.each()?.map(|block| read(&block)).collect::<Result<Vec<_>>>()?;
    Ok(together(&texts))
}

/// Texts of one message as one.
pub(super) fn together<'v>(texts: &[Cow<'v, str>]) -> Cow<'v, str> {
    match texts {
        [only] => only.clone(),
        _ => Cow::Owned(texts.join(BETWEEN_PARTS)),
    }
}

/// The words of one block.
pub(super) fn words<'v>(block: &At<'v, '_>) -> Result<Cow<'v, str>> {
    match kind(block)? {
        "document" => document(block),
        "search_result" => {
            let [title, source] = ["title", "source"].map(|key| block.need(key).and_then(|at| at.string().map(Cow::Borrowed)));
            Ok(together(&[title?, source?, text_of(&block.need("content")?, plain)?]))
        }
        // A tool that searches tools names what it found; its definition is among the tools.
        "tool_reference" => Ok(Cow::Owned(format!("[tool: {}]", block.need("tool_name")?.string()?))),
        _ => plain(block),
    }
}

/// The text of one block, which is all that other blocks have in them.
fn plain<'v>(block: &At<'v, '_>) -> Result<Cow<'v, str>> {
    match kind(block)? {
        "text" => block.need("text")?.string().map(Cow::Borrowed),
        name @ ("image" | "container_upload") => {
            let kind = block.need("type")?;
            Err(kind.unsupported(format_args!("is \"{name}\": this server takes text only")).hint("send blocks of type text"))
        }
        _ => Err(block.need("type")?.wrong("the type of a block that may stand here, such as \"text\"")),
    }
}

/// A document of plain text, with what is said of it before it.
fn document<'v>(block: &At<'v, '_>) -> Result<Cow<'v, str>> {
    let source = block.need("source")?;
    source.object()?;
    let kind = source.need("type")?;
    let body = match kind.string()? {
        "text" => Cow::Borrowed(source.need("data")?.string()?),
        "content" => text_of(&source.need("content")?, plain)?,
        name @ ("base64" | "url" | "file") => {
            let error = kind.unsupported(format_args!("is \"{name}\": this server takes documents of plain text only"));
            return Err(error.hint("send the document's text, as a source of type text"));
        }
        _ => return Err(kind.wrong("one of \"text\", \"content\", \"base64\", \"url\", \"file\"")),
    };
    let mut texts = Vec::new();
    for key in ["title", "context"] {
        if let Some(at) = block.get(key) {
            texts.push(Cow::Borrowed(at.string()?));
        }
    }
    texts.push(body);
    Ok(together(&texts))
}

/// What a provider's own tool did, as text: the model is told that it happened. What is sealed is for that provider alone.
pub(super) fn told(kind: &str, block: &At<'_, '_>) -> Result<String> {
    let mut fields = block.object()?.clone();
    fields.retain(|key, value| !matches!(key.as_str(), "type" | "id" | "tool_use_id" | "cache_control" | "caller") && !value.is_null());
    for found in fields.get_mut("content").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(found) = found.as_object_mut() {
            found.retain(|key, _| key != "encrypted_content");
        }
    }
    Ok(format!("[{kind}: {}]", Value::Object(fields)))
}
