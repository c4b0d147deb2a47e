//! Grammars of whole answers: what they allow is what the parser of the same family reads as such, and a call is always of its schema.

use std::collections::BTreeMap;
use std::sync::Arc;

use emberd::engine::Constraint;
use emberd::grammar::{Calls, Grammar, Tag, Thoughts, Whole, compile};
use emberd::prompt::Tokenizer;
use emberd::text::{Family, Format, Kind, Parsed, Parser, Signatures, Written};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::vocab;

/// A model with single bytes for tokens, but for its marks where these are `special`.
struct Model {
    tokenizer: Arc<Tokenizer>,
    eos: u32,
}

impl Model {
    fn new(marks: &[&str]) -> Self {
        let mut file = vocab::byte_level();
        let tokens = file["added_tokens"].as_array_mut().unwrap();
        tokens.retain(|token| token["special"] == json!(true));
        let next = tokens.iter().map(|token| token["id"].as_u64().unwrap()).max().unwrap() + 1;
        tokens.extend((next..).zip(marks).map(|(id, mark)| json!({"id": id, "content": mark, "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false})));
        let tokenizer = Arc::new(Tokenizer::from_parts(file.to_string().as_bytes(), "").unwrap());
        let eos = tokenizer.token_to_id("<|im_end|>").unwrap();
        Self { tokenizer, eos }
    }

    fn compile(&self, whole: &Whole) -> Constraint {
        let size = u32::try_from(self.tokenizer.vocab_size()).unwrap() + 64;
        compile(Arc::clone(&self.tokenizer), size, &[self.eos], &Grammar::Whole(whole.clone())).unwrap()
    }

    /// The id that a text begins with: a special token, or a byte.
    fn first(&self, text: &[u8]) -> u32 {
        let bytes = |id: &u32| self.tokenizer.detokeniser().bytes(*id);
        let special = (0..1024).filter(|id| self.tokenizer.is_special(*id)).find(|id| text.starts_with(&bytes(id)));
        special.unwrap_or_else(|| (0..300).find(|id| bytes(id) == text[..1]).unwrap())
    }

    /// Follows a text as far as it is allowed, and gives that length in bytes. What is certain comes as it is cut; the rest byte by byte.
    fn follow(&self, constraint: &mut Constraint, text: &str) -> usize {
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            let id = constraint.certain().unwrap().front().copied().unwrap_or_else(|| self.first(rest));
            let bytes = self.tokenizer.detokeniser().bytes(id);
            let Some(after) = rest.strip_prefix(bytes.as_slice()) else { break };
            if constraint.accept(id).is_err() {
                break;
            }
            rest = after;
        }
        text.len() - rest.len()
    }

    /// How far a text is allowed, and whether the answer may end after it.
    fn follows(&self, constraint: &Constraint, text: &str) -> (usize, bool) {
        let mut constraint = constraint.clone();
        (self.follow(&mut constraint, text), constraint.accepting().unwrap())
    }

    fn takes(&self, constraint: &Constraint, text: &str) -> bool {
        let (at, ends) = self.follows(constraint, text);
        ends && at == text.len()
    }
}

/// What a reader is told: thoughts `?…`, words `=…`, calls `name(arguments)`.
fn told(family: &Format, leading: bool, prompt: &str, text: &str) -> Vec<String> {
    let tools: Signatures = BTreeMap::from(["weather", "time"].map(|name| (name.to_owned(), json!({"type": "object"}))));
    let parser = Parser::of(*family, Arc::new(tools), prompt).unwrap();
    let mut parser = if leading { parser.leading() } else { parser };
    let mut parsed = Parsed::default();
    for ch in text.chars() {
        parser.push(ch.encode_utf8(&mut [0; 4]), &mut parsed);
    }
    parser.finish(&mut parsed);
    let mut found: Vec<String> = Vec::new();
    for (kind, text) in parsed.spans() {
        match kind {
            Kind::Text => found.push(format!("={text}")),
            Kind::Reasoning => found.push(format!("?{text}")),
            Kind::Call => found.push(format!("{text}(")),
            Kind::Arguments => found.last_mut().unwrap().push_str(text),
            Kind::End { whole } => found.last_mut().unwrap().push(if whole { ')' } else { '!' }),
        }
    }
    found
}

fn place() -> Value {
    json!({"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"], "additionalProperties": false})
}

/// `weather` is strict, `time` takes anything.
fn whole(written: Written, family: Option<&'static Family>, form: Option<Grammar>, thoughts: Option<Thoughts>, once: bool) -> Whole {
    let Written { trigger, open, between, close, bare, channel } = written;
    let tag = |start: &str, name: &str, schema: Value| Tag {
        begin: format!("{start}{name}{between}").into(),
        schema: schema.to_string().into(),
        end: close.into(),
    };
    let start = format!("{trigger}{open}");
    Whole {
        thoughts,
        form: form.map(Box::new),
        calls: Some(Calls {
            trigger: trigger.into(),
            tags: vec![tag(&start, "weather", place()), tag(&start, "time", json!({"type": "object"}))],
            bare: bare.map(|open| tag(open, "weather", place())).into_iter().collect(),
            names: vec!["\"weather\"".into()],
            barred: family.into_iter().flat_map(Family::other_openers).map(Into::into).collect(),
            passed: family.into_iter().flat_map(|family| family.dropped).map(|mark| (*mark).into()).collect(),
            once,
        }),
        channels: channel,
    }
}

fn hermes() -> &'static Family {
    Family::of("")
}

fn call(written: Written, name: &str, arguments: &str) -> String {
    let Written { trigger, open, between, close, .. } = written;
    format!("{trigger}{open}{name}{between}{arguments}{close}")
}

const GOOD: &str = "{\"city\": \"Oslo\", \"days\": 3}";
const BAD: [&str; 5] = ["{}", "{\"city\": \"Oslo\"}", "{\"city\": \"Bonn\", \"days\": 3}", "{\"city\": \"Oslo\", \"days\": 12}", "[1]"];

#[test]
fn every_family_reads_a_held_call_as_that_call_and_no_other_is_allowed() {
    for family in Family::all() {
        let written = family.written();
        let format = Format { family, tags: None };
        // What begins an object is a mark of Llama's, and no token of its own.
        let specials: Vec<&str> = family.marks().filter(|mark| mark.len() > 1).collect();
        for special in [false, true] {
            if written.channel && !special {
                continue; // Channels are nothing but special tokens.
            }
            let model = Model::new(if special { &specials } else { &[] });
            let constraint = model.compile(&whole(written, Some(family), None, None, false));
            let (head, tail) =
                if written.channel { ("<|channel|>analysis<|message|>Hm<|end|><|start|>assistant", "") } else { ("I ask. ", "\n") };
            let what = format!("{} {special}", family.name);
            for arguments in [GOOD, "{\"city\": \"Rome\", \"days\": 9}"] {
                let text = format!("{head}{}", call(written, "weather", arguments));
                assert!(model.takes(&constraint, &text), "{what}: {text} {:?}", model.follows(&constraint, &text));
                let found = told(&format, false, "", &text);
                assert_eq!(found.last().unwrap(), &format!("weather({arguments})"), "{what}: {text}");
                assert_eq!(found.len(), 2, "{what}: {found:?}");
                if !written.channel {
                    let twice = format!("{text}{tail}{}", call(written, "time", "{\"x\": [1, null]}"));
                    assert!(model.takes(&constraint, &twice), "{what}: {twice}");
                    assert_eq!(told(&format, false, "", &twice).last().unwrap(), "time({\"x\": [1, null]})", "{what}");
                }
            }
            for arguments in BAD {
                let text = format!("{head}{}", call(written, "weather", arguments));
                assert!(!model.takes(&constraint, &text), "{what}: {text}");
            }
            assert!(!model.takes(&constraint, &format!("{head}{}", call(written, "nobody", "{}"))), "{what}");
            for opener in family.other_openers() {
                assert!(!model.takes(&constraint, &format!("so {opener}weather")), "{what}: {opener}");
            }
            let plain =
                if written.channel { "<|channel|>final<|message|>plain {words} <b>".to_owned() } else { "plain {words} <b>\n".to_owned() };
            assert!(model.takes(&constraint, &plain), "{what}");
            // Nothing comes after the first where one is all that there may be.
            let once = model.compile(&whole(written, Some(family), None, None, true));
            let one = format!("{head}{}", call(written, "weather", GOOD));
            assert!(model.takes(&once, &one) && model.takes(&once, &plain), "{what}");
            for more in [" ", "x", &call(written, "time", "{}")] {
                assert!(!model.takes(&once, &format!("{one}{more}")), "{what}: {more:?}");
            }
        }
    }
}

#[test]
fn an_answer_that_is_one_object_is_a_held_call_or_calls_nothing_strict() {
    let family = Family::of("Environment: ipython");
    let format = Format { family, tags: None };
    let model = Model::new(&["<|python_tag|>"]);
    let constraint = model.compile(&whole(family.written(), Some(family), None, None, false));
    let object = |name: &str, arguments: &str| format!("{{\"name\": \"{name}\", \"parameters\": {arguments}}}");
    let strict = object("weather", GOOD);
    for (text, found) in [
        (strict.clone(), vec![format!("weather({GOOD})")]),
        (format!("{strict}; {strict}"), vec![format!("weather({GOOD})"); 2]),
        (object("time", "{\"a\": 1}"), vec!["time({\"a\": 1})".to_owned()]),
        ("{\"answer\": 4}".to_owned(), vec!["={\"answer\": 4}".to_owned()]),
        ("The weather {is} fine".to_owned(), vec!["=The weather {is} fine".to_owned()]),
    ] {
        assert!(model.takes(&constraint, &text), "{text} {:?}", model.follows(&constraint, &text));
        assert_eq!(told(&format, false, "", &text), found, "{text}");
    }
    for text in
        [object("weather", "{}"), "{\"parameters\": {}, \"name\": \"weather\"}".to_owned(), "{ \"name\": \"w\\u0065ather\"".to_owned()]
    {
        assert!(!model.takes(&constraint, &text), "{text}");
    }
}

fn thinks(inside: bool) -> Option<Thoughts> {
    Some(Thoughts { open: "<think>".into(), close: "</think>".into(), inside })
}

#[test]
fn thoughts_come_first_and_what_is_in_them_is_no_call() {
    let format = Format::of("<tool_call> <think></think>");
    let one = call(format.family.written(), "weather", GOOD);
    let schema = Grammar::JsonSchema(
        json!({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": false})
            .to_string()
            .into(),
    );
    for special in [false, true] {
        let model = Model::new(if special { &["<think>", "</think>"] } else { &[] });
        let free = |inside| model.compile(&whole(format.family.written(), Some(format.family), None, thinks(inside), false));
        let formed =
            |inside| model.compile(&whole(format.family.written(), Some(format.family), Some(schema.clone()), thinks(inside), false));
        let thought = "<think>\nA <tool_call> is due.\n</think>\n\n";
        for (constraint, prompt, text, found) in [
            (free(false), "", format!("{thought}So: {one}"), vec!["?A <tool_call> is due.", "=So:", &format!("weather({GOOD})")]),
            (
                free(false),
                "",
                format!("{one}\n{thought}{one}"),
                vec![&format!("weather({GOOD})")[..], "?A <tool_call> is due.", &format!("weather({GOOD})")],
            ),
            (free(false), "", "<think>Hm <tool_call>".to_owned(), vec!["?Hm <tool_call>"]),
            (free(false), "", "No <think>, no call".to_owned(), vec!["=No <think>, no call"]),
            (free(true), "<think>\n", format!("Hm <tool_call></think>\n{one}"), vec!["?Hm <tool_call>", &format!("weather({GOOD})")]),
            (free(true), "<think>\n", "Hm <tool".to_owned(), vec!["?Hm <tool"]),
            (
                formed(false),
                "",
                format!("{thought}{{\"a\": \"<tool_call>\"}}"),
                vec!["?A <tool_call> is due.", "={\"a\": \"<tool_call>\"}"],
            ),
            (
                formed(false),
                "",
                format!("{thought}{one}\n{one}"),
                vec!["?A <tool_call> is due.", &format!("weather({GOOD})"), &format!("weather({GOOD})")],
            ),
            (formed(true), "<think>\n", "Hm</think>\n\n{\"a\": \"<think>\"}".to_owned(), vec!["?Hm", "={\"a\": \"<think>\"}"]),
            (formed(false), "", "{\"a\": \"x\"}".to_owned(), vec!["={\"a\": \"x\"}"]),
        ] {
            if special && (text.contains("No <think>") || text.contains("\"<think>\"")) {
                continue; // Words have no special tokens in them.
            }
            assert!(model.takes(&constraint, &text), "{special} {text} {:?}", model.follows(&constraint, &text));
            let leading = text.contains("\"a\"");
            assert_eq!(told(&format, leading, prompt, &text), found, "{text}");
        }
        let bad = call(format.family.written(), "weather", "{}");
        for (constraint, text) in [
            (free(false), format!("{thought}{bad}")),
            (free(true), format!("</think>{bad}")),
            (formed(false), format!("{thought}{bad}")),
            (formed(false), format!("{thought}words")),
            (formed(false), "<think>only thoughts".to_owned()),
            (formed(true), "only thoughts".to_owned()),
        ] {
            assert!(!model.takes(&constraint, &text), "{special} {text}");
        }
    }
}

#[test]
fn words_of_a_form_or_calls_and_nothing_else() {
    let written = hermes().written();
    let format = Format { family: hermes(), tags: None };
    let one = call(written, "weather", GOOD);
    let forms = [
        (Grammar::JsonObject, vec!["{\"a\": \"<tool_call>\\n{\\\"name\\\": \\\"time\\\"}\"}"], vec!["words", "[]", "{}x"]),
        (Grammar::JsonSchema(json!({"type": "string", "maxLength": 20}).to_string().into()), vec!["\"<tool_call>\""], vec!["1"]),
        (Grammar::Regex("(yes|no)( [a-z/]+)?".into()), vec!["yes", "no a/b"], vec!["maybe"]),
        (Grammar::Lark("start: \"on\" | \"off\" NUMBER\nNUMBER: /[0-9]+/".into()), vec!["on", "off12"], vec!["of"]),
    ];
    for special in [false, true] {
        let model = Model::new(if special { &["<tool_call>", "</tool_call>"] } else { &[] });
        for (form, good, bad) in &forms {
            let constraint = model.compile(&whole(written, Some(hermes()), Some(form.clone()), None, false));
            for text in good.iter().filter(|text| !special || !text.contains("<tool_call>")) {
                assert!(model.takes(&constraint, text), "{form:?} {text} {:?}", model.follows(&constraint, text));
                assert_eq!(told(&format, true, "", text), [format!("={text}")]);
            }
            for text in bad {
                assert!(!model.takes(&constraint, text), "{form:?} {text}");
            }
            for calls in [one.clone(), format!("{one}\n{one}")] {
                assert!(model.takes(&constraint, &calls), "{form:?} {calls}");
            }
            for text in [format!("{}{one}", good[0]), format!("{one}{}", good[0]), format!("x {one}"), call(written, "weather", "{}")] {
                assert!(!model.takes(&constraint, &text), "{form:?} {text}");
            }
            let once = model.compile(&whole(written, Some(hermes()), Some(form.clone()), None, true));
            assert!(model.takes(&once, &one) && !model.takes(&once, &format!("{one}\n{one}")), "{form:?}");
        }
    }
    // A call goes before a form that would take its mark too.
    let model = Model::new(&[]);
    let any = model.compile(&whole(written, Some(hermes()), Some(Grammar::Regex("(.|\\n)*".into())), None, false));
    assert!(model.takes(&any, &one) && model.takes(&any, "any words") && !model.takes(&any, &call(written, "weather", "{}")));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn whatever_is_chosen_after_the_mark_the_arguments_are_of_the_schema(choices in prop::collection::vec(any::<u16>(), 64), at in 0_usize..18, head in "[a-z <{]{0,6}") {
        let families: Vec<&'static Family> = Family::all().filter(|family| !family.written().channel).collect();
        let family = families[at % families.len()];
        let written = family.written();
        let model = Model::new(&[]);
        let mut constraint = model.compile(&whole(written, Some(family), None, None, true));
        let begin = format!(".{head}{}{}weather{}", written.trigger, written.open, written.between);
        prop_assert_eq!(model.follow(&mut constraint, &begin), begin.len(), "{}", begin);
        let (mut text, mut choices) = (begin, choices.into_iter());
        let mut bytes = Vec::new();
        while !constraint.complete() {
            let mut words = vec![0; constraint.words()];
            constraint.mask(&mut words).unwrap();
            let allowed: Vec<u32> = (0..).zip(&words).flat_map(|(at, word)| (0..32).filter(move |bit| word >> bit & 1 == 1).map(move |bit| at * 32 + bit)).collect();
            let id = allowed[usize::from(choices.next().unwrap_or(0)) % allowed.len()];
            constraint.accept(id).unwrap();
            if id != model.eos {
                bytes.extend(model.tokenizer.detokeniser().bytes(id));
            }
        }
        text.push_str(std::str::from_utf8(&bytes).unwrap());
        let found = told(&Format { family, tags: None }, false, "", &text);
        let arguments = found.last().unwrap().strip_prefix("weather(").and_then(|call| call.strip_suffix(')'));
        let value: Value = serde_json::from_str(arguments.unwrap_or_else(|| panic!("{found:?}"))).unwrap();
        prop_assert!(value["city"] == "Oslo" || value["city"] == "Rome");
        prop_assert!((1..=9).contains(&value["days"].as_i64().unwrap()));
        prop_assert_eq!(value.as_object().unwrap().len(), 2);
    }
}
