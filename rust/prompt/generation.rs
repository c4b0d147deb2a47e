//! The `{% generation %}` block, which marks the text a model wrote and prints it unchanged. minijinja has no custom tags, so the marks are
//! replaced before compiling by `{% with %}`, which opens the same kind of scope. Nothing else of the source is touched, and lines keep their
//! numbers.

use std::borrow::Cow;

/// `source` with every `generation` tag replaced. Comments, raw blocks and strings inside expressions are left alone.
pub(super) fn rewrite(source: &str) -> Cow<'_, str> {
    if !source.contains("generation") {
        return Cow::Borrowed(source);
    }
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{").filter(|_| !rest.is_empty()) {
        let (before, from) = rest.split_at(at);
        out.push_str(before);
        let (whole, tag) = match from.as_bytes().get(1) {
            Some(b'#') => (from.find("#}").map_or(from.len(), |end| end + 2), None),
            Some(b'{') => (end_of_tag(from, "}}"), None),
            Some(b'%') => {
                let end = end_of_tag(from, "%}");
                (end, Some(&from[..end]))
            }
            _ => (1, None),
        };
        let (text, mut after) = from.split_at(whole);
        match tag.map(name) {
            Some("generation") => out.push_str(&text.replacen("generation", "with", 1)),
            Some("endgeneration") => out.push_str(&text.replacen("endgeneration", "endwith", 1)),
            Some("raw") => {
                let end = end_of_raw(after);
                out.push_str(text);
                out.push_str(&after[..end]);
                after = &after[end..];
            }
            _ => out.push_str(text),
        }
        rest = after;
    }
    out.push_str(rest);
    Cow::Owned(out)
}

/// The tag's only word: `generation` of `{%- generation -%}`. Tags of several words give all of them.
fn name(tag: &str) -> &str {
    let inner = tag.strip_prefix("{%").and_then(|tag| tag.strip_suffix("%}")).unwrap_or_default();
    inner.trim_matches(['-', '+']).trim()
}

/// Where the tag that opens `from` ends, its closing mark included; a mark inside a string does not count.
fn end_of_tag(from: &str, mark: &str) -> usize {
    let mut quote = None;
    let mut escaped = false;
    for (at, ch) in from.char_indices().skip(2) {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if ch == '\\' => escaped = true,
            Some(open) if ch == open => quote = None,
            Some(_) => {}
            None if matches!(ch, '\'' | '"') => quote = Some(ch),
            None if from[at..].starts_with(mark) => return at + mark.len(),
            None => {}
        }
    }
    from.len()
}

/// Where the `endraw` tag starts in the text after a `raw` tag.
fn end_of_raw(after: &str) -> usize {
    let mut from = 0;
    while let Some(at) = after[from..].find("{%") {
        let start = from + at;
        if name(&after[start..start + end_of_tag(&after[start..], "%}")]) == "endraw" {
            return start;
        }
        from = start + 2;
    }
    after.len()
}

#[cfg(test)]
mod tests {
    use super::rewrite;

    #[test]
    fn tags_are_replaced_with_their_whitespace_marks() {
        assert_eq!(rewrite("a{%- generation +%}b{%endgeneration-%}c"), "a{%- with +%}b{%endwith-%}c");
    }

    #[test]
    fn comments_strings_raw_blocks_and_names_stay() {
        for same in [
            "{# {% generation %} #}",
            "{{ '{% generation %}' }}",
            "{% raw %}{% generation %}{% endraw %}",
            "{% if add_generation_prompt %}x{% endif %}",
            "{ generation } {% set x = \"%}{% generation %}\" %}",
            "{% generation",
        ] {
            assert_eq!(rewrite(same), same);
        }
    }
}
