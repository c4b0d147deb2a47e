//! Two small changes to a template's source before minijinja compiles it, for what minijinja cannot be told in another way.
//!
//! * `{% generation %}` marks the text a model wrote and prints it unchanged. There are no custom tags, so it becomes `{% with %}`, which opens
//!   the same kind of scope.
//! * `{% for x in none %}` is an error in Python and an empty loop in minijinja. The walked value is passed through the filter [`EACH`].
//!
//! Nothing else is touched: not comments, raw blocks or strings inside expressions, and lines keep their numbers.

/// The filter that every walked value passes. No template can mean another by this name.
pub(super) const EACH: &str = "__each";

/// `source` with both changes made.
pub(super) fn rewrite(source: &str) -> String {
    let mut out = String::with_capacity(source.len() + source.len() / 16);
    let mut rest = source;
    while let Some(at) = rest.find('{') {
        let (before, from) = rest.split_at(at);
        out.push_str(before);
        let length = match from.as_bytes().get(1) {
            Some(b'#') => from.find("#}").map_or(from.len(), |end| end + 2),
            Some(b'{') => end_of_tag(from, "}}"),
            Some(b'%') => end_of_tag(from, "%}"),
            _ => 1,
        };
        let (text, mut after) = from.split_at(length);
        match first_word(text) {
            "generation" => out.push_str(&text.replacen("generation", "with", 1)),
            "endgeneration" => out.push_str(&text.replacen("endgeneration", "endwith", 1)),
            "for" => push_loop(&mut out, text),
            "raw" => {
                out.push_str(text);
                let end = end_of_raw(after);
                out.push_str(&after[..end]);
                after = &after[end..];
            }
            _ => out.push_str(text),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// The word that says what a `{% … %}` tag does; empty for anything else.
fn first_word(tag: &str) -> &str {
    let Some(inner) = tag.strip_prefix("{%").filter(|_| tag.ends_with("%}")) else {
        return "";
    };
    let inner = inner.trim_start_matches(['-', '+']).trim_start();
    let end = inner.find(|ch: char| !is_word(ch)).unwrap_or(inner.len());
    &inner[..end]
}

fn is_word(ch: char) -> bool {
    ch == '_' || ch.is_alphanumeric()
}

/// Calls `visit(position, character)` for the characters of `text` that are outside of strings and brackets, until it returns true. Returns
/// where it stopped.
fn outside(text: &str, mut visit: impl FnMut(usize, char) -> bool) -> Option<usize> {
    let mut quote = None;
    let mut escaped = false;
    let mut depth = 0_usize;
    for (at, ch) in text.char_indices() {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if ch == '\\' => escaped = true,
            Some(open) if ch == open => quote = None,
            Some(_) => {}
            None if depth == 0 && visit(at, ch) => return Some(at),
            None => match ch {
                '\'' | '"' => quote = Some(ch),
                '(' | '[' | '{' => depth += 1,
                ')' | ']' | '}' => depth = depth.saturating_sub(1),
                _ => {}
            },
        }
    }
    None
}

/// Where the tag that opens `from` ends, its closing mark included.
fn end_of_tag(from: &str, mark: &str) -> usize {
    let inner = &from[2..];
    outside(inner, |at, _| inner[at..].starts_with(mark)).map_or(from.len(), |at| 2 + at + mark.len())
}

/// Where the `endraw` tag starts in the text after a `raw` tag.
fn end_of_raw(after: &str) -> usize {
    let mut from = 0;
    while let Some(at) = after[from..].find("{%") {
        let start = from + at;
        let length = after[start..].find("%}").map_or(after.len() - start, |end| end + 2);
        if first_word(&after[start..start + length]) == "endraw" {
            return start;
        }
        from = start + 2;
    }
    after.len()
}

/// Writes `{% for x in walked if … %}` as `{% for x in (walked)|__each if … %}`.
fn push_loop(out: &mut String, tag: &str) {
    let end = tag.len() - 2 - usize::from(tag[..tag.len() - 2].ends_with(['-', '+']));
    let inner = &tag[2..end];
    let mut walked = None;
    let mut stop = inner.len();
    let mut previous = ' ';
    outside(inner, |at, ch| {
        let starts = is_word(ch) && !is_word(previous) && previous != '.';
        previous = ch;
        if !starts {
            return false;
        }
        let word = inner[at..].split(|ch| !is_word(ch)).next().unwrap_or_default();
        match (walked, word) {
            (None, "in") => walked = Some(at + 2),
            (Some(_), "if" | "recursive") => {
                stop = at;
                return true;
            }
            _ => {}
        }
        false
    });
    let Some(start) = walked else {
        return out.push_str(tag);
    };
    out.push_str(&tag[..2 + start]);
    out.push_str(" (");
    out.push_str(&inner[start..stop]);
    out.push_str(")|");
    out.push_str(EACH);
    out.push(' ');
    out.push_str(&tag[2 + stop..]);
}

#[cfg(test)]
mod tests {
    use super::rewrite;

    #[test]
    fn generation_tags_are_replaced_with_their_whitespace_marks() {
        assert_eq!(rewrite("a{%- generation +%}b{%endgeneration-%}c"), "a{%- with +%}b{%endwith-%}c");
    }

    #[test]
    fn walked_values_pass_a_filter() {
        assert_eq!(rewrite("{%for x in y%}"), "{%for x in ( y)|__each %}");
        assert_eq!(
            rewrite("{%- for a, b in c.if['in'].items() if a in 'x if y' recursive -%}"),
            "{%- for a, b in ( c.if['in'].items() )|__each if a in 'x if y' recursive -%}"
        );
        assert_eq!(rewrite("{% for x in (a if b else c) %}"), "{% for x in ( (a if b else c) )|__each %}");
    }

    #[test]
    fn comments_strings_raw_blocks_and_names_stay() {
        for same in [
            "{# {% generation %} #}",
            "{{ '{% generation %}' }}",
            "{{ {'a': {}} ~ '{% generation %}' }}",
            "{% raw %}{% generation %}' {% for x in y %}{% endraw %}",
            "{% if add_generation_prompt %}x{% endif %}",
            "{ generation } {% set x = \"%}{% generation %}\" %}",
            "{% generation",
            "{% for",
            "{",
        ] {
            assert_eq!(rewrite(same), same);
        }
    }
}
