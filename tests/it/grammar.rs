//! Grammars: what they allow, what is refused and why, and what a hostile one can do, which is nothing.

use std::sync::Arc;

use emberd::engine::Constraint;
use emberd::error::{Code, Error};
use emberd::grammar::{Grammar, Tag, Tagged, compile};
use emberd::prompt::Tokenizer;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::vocab;

fn tokenizer(file: &Value) -> Arc<Tokenizer> {
    Arc::new(Tokenizer::from_parts(file.to_string().as_bytes(), "").unwrap())
}

/// A model: its tokenizer, and the id that ends its answers.
struct Model {
    tokenizer: Arc<Tokenizer>,
    eos: u32,
}

impl Model {
    fn bytes() -> Self {
        let tokenizer = tokenizer(&vocab::byte_level());
        let eos = tokenizer.token_to_id("<|im_end|>").unwrap();
        Self { tokenizer, eos }
    }

    fn pieces() -> Self {
        Self { tokenizer: tokenizer(&vocab::byte_fallback()), eos: 2 }
    }

    fn vocab_size(&self) -> u32 {
        u32::try_from(self.tokenizer.vocab_size()).unwrap()
    }

    fn compile(&self, grammar: &Grammar) -> Result<Constraint, Error> {
        compile(Arc::clone(&self.tokenizer), self.vocab_size(), &[self.eos], grammar)
    }

    fn schema(&self, schema: &Value) -> Constraint {
        self.compile(&Grammar::JsonSchema(schema.to_string().into())).unwrap()
    }

    fn refused(&self, grammar: &Grammar) -> String {
        let error = self.compile(grammar).expect_err("it cannot be used");
        assert_eq!(error.code, Code::InvalidValue, "{error}");
        assert!(error.hint.is_some() && error.message.len() < 500 && !error.message.contains('\n'), "{error}");
        error.message.into_owned()
    }

    /// Whether a text is a whole answer: the ids that the tokenizer makes of it are accepted one by one, and it may end there.
    fn takes(&self, constraint: &Constraint, text: &str) -> bool {
        let mut constraint = constraint.clone();
        let mut rest = text.as_bytes();
        // Certain ids come as they are; a choice is made byte by byte, so that every cut of the text is as good as another.
        while !rest.is_empty() {
            let certain = constraint.certain().unwrap().front().copied();
            let id = certain.unwrap_or_else(|| self.first(&mut constraint, rest));
            let bytes = self.tokenizer.detokeniser().bytes(id);
            let Some(after) = rest.strip_prefix(bytes.as_slice()) else { return false };
            if constraint.accept(id).is_err() {
                return false;
            }
            rest = after;
        }
        constraint.accept(self.eos).is_ok()
    }

    /// The shortest allowed token that the text begins with; the one of its first byte where there is none.
    fn first(&self, constraint: &mut Constraint, text: &[u8]) -> u32 {
        let fits = |id: &u32| {
            let bytes = self.tokenizer.detokeniser().bytes(*id);
            (!bytes.is_empty() && text.starts_with(&bytes) && !self.tokenizer.is_special(*id)).then_some((bytes.len(), *id))
        };
        let allowed = allowed(constraint);
        let ids = allowed.iter().filter_map(fits).min();
        ids.or_else(|| (0..self.vocab_size()).filter_map(|id| fits(&id)).min()).unwrap().1
    }
}

fn allowed(constraint: &mut Constraint) -> Vec<u32> {
    let mut words = vec![u32::MAX; constraint.words()];
    constraint.mask(&mut words).unwrap();
    (0..).zip(&words).flat_map(|(at, word)| (0..32).filter(move |bit| word >> bit & 1 == 1).map(move |bit| at * 32 + bit)).collect()
}

/// What comes of choices that `next` makes among what is allowed. `None` where the answer is not over after so many ids.
fn answer(model: &Model, mut constraint: Constraint, most: usize, mut next: impl FnMut(usize) -> usize) -> Option<String> {
    let mut ids = Vec::new();
    for _ in 0..most {
        let allowed = allowed(&mut constraint);
        let id = allowed[next(allowed.len())];
        if id == model.eos {
            constraint.accept(id).unwrap();
            assert!(constraint.complete());
            return Some(model.tokenizer.detokeniser().decode(&ids));
        }
        constraint.accept(id).unwrap();
        ids.push(id);
    }
    None
}

fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["red", "green é"]}, "maxItems": 2},
            "more": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pet"}]},
        },
        "required": ["name", "age", "tags", "more"],
        "additionalProperties": false,
        "$defs": {"pet": {"type": "object", "properties": {"cat": {"const": "mo\"w"}}, "required": ["cat"], "additionalProperties": false}},
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn whatever_is_chosen_the_answer_is_json_of_the_schema(choices in prop::collection::vec(any::<u16>(), 200), pieces in any::<bool>()) {
        let model = if pieces { Model::pieces() } else { Model::bytes() };
        let mut choices = choices.into_iter();
        let text = answer(&model, model.schema(&person()), 200, |count| usize::from(choices.next().unwrap_or(0)) % count).unwrap();
        let value: Value = serde_json::from_str(&text).unwrap();
        let keys: Vec<_> = value.as_object().unwrap().keys().map(String::as_str).collect();
        prop_assert_eq!(keys, ["name", "age", "tags", "more"]);
        prop_assert!(value["name"].as_str().unwrap().chars().count() <= 6);
        prop_assert!((0..=120).contains(&value["age"].as_i64().unwrap()));
        let tags = value["tags"].as_array().unwrap();
        prop_assert!(tags.len() <= 2 && tags.iter().all(|tag| tag == "red" || tag == "green é"));
        let pet = json!({"cat": "mo\"w"});
        prop_assert!(value["more"].is_null() || value["more"] == pet);
    }
}

#[test]
fn each_kind_allows_its_texts_and_no_others() {
    let model = Model::bytes();
    let lark = "start: greeting (\", \" NAME)* \"!\"\ngreeting: \"hello\" | \"hi\"\nNAME: /[a-z]{2,5}/";
    let cases: [(Grammar, &[&str], &[&str]); 4] = [
        (Grammar::JsonObject, &["{}", r#"{"a": [1, {"b": null}], "c": "x\n"}"#], &["[]", "1", "", "{} ", r#"{"a":1}"#, "{\"a\"}"]),
        (Grammar::Regex("[0-9]{3}-(a|é)/?".into()), &["123-a", "999-é/"], &["12-a", "123-b", "123-a//", ""]),
        (Grammar::Lark(lark.into()), &["hi!", "hello, you, all!"], &["hi", "hello you!", "hi, me!, x"]),
        (Grammar::JsonSchema("true".into()), &["1", "\"x\"", "[true, false]"], &["", "tru"]),
    ];
    for (grammar, good, bad) in cases {
        let constraint = model.compile(&grammar).unwrap();
        for text in good {
            assert!(model.takes(&constraint, text), "{grammar:?} takes {text:?}");
        }
        for text in bad {
            assert!(!model.takes(&constraint, text), "{grammar:?} takes no {text:?}");
        }
    }
}

#[test]
fn what_is_certain_is_told_in_the_tokenizers_own_tokens() {
    let model = Model::bytes();
    let mut constraint = model.compile(&Grammar::Regex("(a|b)hello world!(c|d)".into())).unwrap();
    assert!(constraint.certain().unwrap().is_empty());
    let id = |text: &str| model.tokenizer.token_to_id(text).unwrap();
    constraint.accept(id("b")).unwrap();
    let certain: Vec<u32> = constraint.certain().unwrap().iter().copied().collect();
    assert_eq!(model.tokenizer.detokeniser().decode(&certain), "hello world!");
    assert_eq!(certain, model.tokenizer.encode("hello world!", false).unwrap());
    // Its mask has this one alone, whatever else would spell it.
    assert_eq!(allowed(&mut constraint), &certain[..1]);
    assert!(constraint.accept(id("h")).is_err());
    for token in certain {
        constraint.accept(token).unwrap();
    }
    assert_eq!(allowed(&mut constraint), [id("c"), id("d")]);
    assert!(!constraint.accepting().unwrap());
    constraint.accept(id("d")).unwrap();
    assert!(constraint.complete() && constraint.accepting().unwrap() && constraint.certain().unwrap().is_empty());
    assert_eq!(allowed(&mut constraint), [model.eos]);
}

#[test]
fn a_special_token_is_no_text_even_where_its_name_is_allowed() {
    let model = Model::bytes();
    let mut constraint = model.compile(&Grammar::Regex("(.|\\n)*".into())).unwrap();
    let ids = allowed(&mut constraint);
    let start = model.tokenizer.token_to_id("<|im_start|>").unwrap();
    assert!(!ids.contains(&start) && ids.contains(&model.eos));
    let mut named = model.compile(&Grammar::JsonSchema(json!({"const": "<|im_start|>"}).to_string().into())).unwrap();
    let certain: Vec<u32> = named.certain().unwrap().iter().copied().collect();
    assert!(!certain.contains(&start), "{certain:?}");
}

#[test]
fn a_constraint_is_the_requests_own() {
    let model = Model::bytes();
    let first = model.compile(&Grammar::Regex("ab|cd".into())).unwrap();
    let (mut one, mut other) = (first.clone(), first.clone());
    let id = |text: &str| model.tokenizer.token_to_id(text).unwrap();
    one.accept(id("a")).unwrap();
    other.accept(id("c")).unwrap();
    assert_eq!(allowed(&mut one), [id("b")]);
    assert_eq!(allowed(&mut other), [id("d")]);
    assert_eq!(one, other, "both are of one rule");
    assert_ne!(one, model.compile(&Grammar::Regex("ab|cd".into())).unwrap());
}

fn tagged(text: bool, least: u32, most: Option<u32>) -> Tagged {
    let tag = |name: &str, schema: Value| Tag {
        begin: format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": ").into(),
        schema: schema.to_string().into(),
        end: "}\n</tool_call>".into(),
    };
    let place = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": false});
    let none = json!({"type": "object", "additionalProperties": false});
    Tagged { trigger: "<tool_call>".into(), tags: vec![tag("weather", place), tag("time", none)], text, least, most }
}

const WEATHER: &str = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>";
const TIME: &str = "<tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n</tool_call>";

#[test]
fn calls_are_of_their_schemas_and_text_is_free() {
    let model = Model::bytes();
    let free = model.compile(&Grammar::Tagged(tagged(true, 0, None))).unwrap();
    let other = TIME.replace("time", "space");
    for text in ["", "just text, with {json} and <tags>", WEATHER, &format!("let me see\n{WEATHER}\n{TIME} done")] {
        assert!(model.takes(&free, text), "{text:?}");
    }
    for text in ["<tool_call>", "x <tool_call> y", &other, &WEATHER.replace("city", "town"), &format!("a {WEATHER}<tool_call>")] {
        assert!(!model.takes(&free, text), "{text:?}");
    }
    let one = model.compile(&Grammar::Tagged(tagged(false, 1, Some(1)))).unwrap();
    assert!(model.takes(&one, TIME) && model.takes(&one, WEATHER));
    for text in ["", "text", &format!("{TIME}{TIME}"), &format!(" {TIME}"), &format!("{TIME} ")] {
        assert!(!model.takes(&one, text), "{text:?}");
    }
    let some = model.compile(&Grammar::Tagged(tagged(true, 1, None))).unwrap();
    assert!(model.takes(&some, &format!("well: {TIME}")) && !model.takes(&some, "no call"));
}

#[test]
fn a_trigger_that_is_a_token_of_its_own_kind_is_that_token() {
    let mut file = vocab::byte_level();
    let call = file["added_tokens"].as_array_mut().unwrap().iter_mut().find(|token| token["content"] == "<tool_call>").unwrap();
    call["special"] = json!(true);
    let tokenizer = tokenizer(&file);
    let model = Model { eos: tokenizer.token_to_id("<|im_end|>").unwrap(), tokenizer };
    let mut constraint = model.compile(&Grammar::Tagged(tagged(false, 1, Some(1)))).unwrap();
    let first = constraint.certain().unwrap().front().copied();
    assert_eq!(first, model.tokenizer.token_to_id("<tool_call>"));
    let mut free = model.compile(&Grammar::Tagged(tagged(true, 0, None))).unwrap();
    assert!(allowed(&mut free).contains(&first.unwrap()));
}

#[test]
fn tags_that_cannot_be_are_refused() {
    let model = Model::bytes();
    let mut other = tagged(true, 0, None);
    other.tags[0].begin = "<call>".into();
    assert!(model.refused(&Grammar::Tagged(other)).contains("does not begin with"));
    let mut none = tagged(true, 0, None);
    none.tags.clear();
    assert!(model.refused(&Grammar::Tagged(none)).contains("no tags"));
    let mut bad = tagged(true, 0, None);
    bad.tags[1].schema = json!({"not": {}}).to_string().into();
    assert!(model.refused(&Grammar::Tagged(bad)).contains("not"));
}

#[test]
fn what_cannot_be_used_is_refused_with_the_reason() {
    let model = Model::bytes();
    let schema = |value: Value| Grammar::JsonSchema(value.to_string().into());
    for (grammar, reason) in [
        (Grammar::JsonSchema("{".into()), "not JSON"),
        (Grammar::JsonSchema("[]".into()), "no JSON object"),
        (Grammar::JsonSchema("false".into()), "no JSON satisfies"),
        (schema(json!({"not": {"type": "string"}})), "not"),
        (schema(json!({"type": "array", "uniqueItems": true})), "uniqueItems"),
        (schema(json!({"type": "wibble"})), "wibble"),
        (schema(json!({"type": "object", "properties": []})), "properties"),
        (schema(json!({"allOf": [{"type": "string"}, {"type": "number"}]})), "nsatisfiable"),
        (schema(json!({"oneOf": [{"type": "object"}, {"type": "object", "properties": {"a": {}}}]})), "oneOf"),
        (schema(json!({"type": "string", "pattern": "("})), "unclosed group"),
        (schema(json!({"$ref": "#"})), "no text at all"),
        (schema(json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})), "no text at all"),
        (schema(json!({"$ref": "#/nowhere"})), "/nowhere"),
        (schema(json!({"$ref": "http://localhost/x"})), "http://localhost/x"),
        // The library's own switches are not the client's.
        (schema(json!({"x-guidance": {"lenient": true}, "not": {}})), "not"),
        (Grammar::Regex("(".into()), "unclosed group"),
        (Grammar::Regex("(?=a)b".into()), "look-around"),
        (Grammar::Lark(String::new().into()), "no start rule"),
        (Grammar::Lark("start: nowhere".into()), "nowhere"),
        (Grammar::Lark("start: start".into()), "no text at all"),
    ] {
        let message = model.refused(&grammar);
        assert!(message.contains(reason), "{grammar:?}: {message}");
    }
}

/// What a hostile client may send. Each ends, with a refusal or with a constraint that works.
#[test]
fn a_hostile_grammar_takes_neither_time_nor_memory() {
    let model = Model::bytes();
    let schema = |value: Value| Grammar::JsonSchema(value.to_string().into());
    let chain: serde_json::Map<String, Value> = (0..1400)
        .map(|at| (format!("d{at}"), json!({"$ref": format!("#/$defs/d{}", at + 1)})))
        .chain([("d1400".to_owned(), json!({}))])
        .collect();
    let product: Vec<Value> = (0..8)
        .map(|part| json!({"anyOf": (0..10).map(|at| json!({"properties": {format!("p{part}{at}"): {}}})).collect::<Vec<_>>()}))
        .collect();
    let doubled: String = (0..40).map(|at| format!("A{at}: A{} A{}\n", at + 1, at + 1)).collect();
    let rules: String = (0..5000).map(|at| format!("a{at}: a{}\n", at + 1)).collect();
    let refused = [
        (Grammar::Regex("x".repeat(70_000).into()), "bytes, above"),
        (schema(json!({"const": "x".repeat(70_000)})), "bytes, above"),
        (schema(json!({"allOf": product})), "too complex"),
        (
            schema(
                json!({"anyOf": vec![json!({"type": "object"}); 1000], "properties": (0..400).map(|at| (format!("p{at}"), json!({}))).collect::<serde_json::Map<_, _>>()}),
            ),
            "too complex",
        ),
        (
            schema(json!({"patternProperties": (0..1000).map(|at| (format!("p{at}"), json!({}))).collect::<serde_json::Map<_, _>>()})),
            "patternProperties",
        ),
        (Grammar::Regex("(((((a{100}){100}){100}){100}){100})".into()), "too long"),
        (Grammar::Regex(format!("{}a{}", "(".repeat(10_000), ")".repeat(10_000)).into()), "nest"),
        (Grammar::Lark("start: \"a\" start".into()), "Too many items"),
        (Grammar::Lark(format!("start: {}\"a\"{}", "(".repeat(10_000), ")".repeat(10_000)).into()), "nested"),
        (Grammar::Lark(format!("start: A0\n{doubled}A40: \"x\"\n").into()), "too big"),
    ];
    for (grammar, reason) in refused {
        let message = model.refused(&grammar);
        assert!(message.contains(reason), "{reason}: {message}");
    }
    for grammar in [
        schema(json!({"$ref": "#/$defs/d0", "$defs": chain})),
        schema(json!({"type": "string", "minLength": 1_000_000_000})),
        schema(json!({"type": "array", "minItems": 1_000_000_000})),
        schema(json!({"enum": (0..5000).collect::<Vec<_>>()})),
        Grammar::Lark(format!("start: a0\n{rules}a5000: \"x\"\n").into()),
        Grammar::Regex(".*.*.*.*.*x".into()),
    ] {
        if let Ok(mut constraint) = model.compile(&grammar) {
            let first = allowed(&mut constraint)[0];
            constraint.accept(first).unwrap();
        }
    }
}

/// Alternatives, sizes and expressions add up through references, properties and the schemas in a Lark grammar.
#[test]
fn what_merging_would_cost_is_seen_before_it_is_done() {
    let model = Model::bytes();
    let schema = |value: &Value| Grammar::JsonSchema(value.to_string().into());
    let lark = |value: &Value| Grammar::Lark(format!("start: \"%json\" a // %json\na: %json  {value}\n").into());
    let pattern = |at: usize| json!({"type": "string", "pattern": format!("a.{{{}}}b", at + 10)});
    let patterns = |count| (0..count).map(pattern).collect::<Vec<_>>();
    let named: Vec<Value> = (0..5).map(|at| json!({"properties": {"x": {"items": pattern(at)}}})).collect();
    let others: Vec<Value> = (0..5).map(|at| json!({"additionalProperties": pattern(at)})).collect();
    let refs = |count: usize| {
        let mut defs: serde_json::Map<String, Value> =
            (0..count).map(|at| (format!("d{at}"), json!({"allOf": vec![json!({"$ref": format!("#/$defs/d{}", at + 1)}); 2]}))).collect();
        defs.insert(format!("d{count}"), json!({"type": "string"}));
        json!({"$ref": "#/$defs/d0", "$defs": defs})
    };
    let again =
        json!({"$defs": {"p": pattern(1), "all": {"allOf": vec![json!({"$ref": "#/$defs/p"}); 5]}}, "items": {"$ref": "#/%24defs/all"}});
    let bombs = [
        json!({"allOf": patterns(40)}),
        json!({"allOf": named}),
        json!({"allOf": others}),
        json!({"properties": {"enum": {"allOf": patterns(5)}}}),
        json!({"anyOf": [{"type": "null"}, {"allOf": patterns(4), "format": "uuid"}]}),
        again,
        refs(60),
        refs(900),
    ];
    for bomb in &bombs {
        for grammar in [schema(bomb), lark(bomb)] {
            let message = model.refused(&grammar);
            assert!(message.contains("too complex"), "{message}");
        }
    }
    let names: Vec<Value> = (0..1000).map(|at| json!({"patternProperties": {format!("^{at}x$"): {}}})).collect();
    assert!(model.refused(&schema(&json!({"items": {"allOf": names}}))).contains("patternProperties"));
    let all = |count: usize| (0..count).map(|at| format!("/.*a.{{{at}}}b.*/")).collect::<Vec<_>>().join(" & ");
    assert!(model.refused(&Grammar::Lark(format!("start: A\nA: {}", all(40)).into())).contains("intersections"));
    let text = r##"start: A "&&&\"&&&" /&&\/&&&&/ // &&&&&&&&&&
A: /[a-z]+/ & /.*b.*/ # &&&&&&&&&&"##;
    assert!(model.takes(&model.compile(&Grammar::Lark(text.into())).unwrap(), r#"ab&&&"&&&&&/&&&&"#));
    // Each of these strings has one pattern to match, or few.
    let fields: serde_json::Map<String, Value> = (0..40).map(|at| (format!("p{at}"), pattern(1))).collect();
    let mixed: Vec<Value> = (0..8).map(|at| json!({"properties": {format!("p{at}"): {"type": "string", "format": "uuid"}}})).collect();
    let tree = json!({"$ref": "#/$defs/t", "$defs": {"t": {"properties": {"name": {"type": "string", "pattern": "^[a-z]+$"}, "sub": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "additionalProperties": false}}});
    for good in [
        json!({"type": "object", "properties": fields}),
        json!({"allOf": mixed}),
        json!({"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "b$"}]}),
        json!({"$id": "https://example.com/x", "$ref": "https://example.com/x#/$defs/a", "$defs": {"a": {"type": "string"}}}),
        json!({"const": {"$ref": "no reference", "$id": "no name"}}),
        refs(4),
        tree,
    ] {
        assert!(model.compile(&schema(&good)).is_ok(), "{good}: {:?}", model.compile(&schema(&good)));
    }
    // A reference that is read otherwise by the library would hide what it costs.
    for hidden in [
        json!({"$ref": "#x", "$defs": {"x": {"$anchor": "x", "allOf": patterns(5)}}}),
        json!({"$defs": {"x": {"$id": "https://example.com/x", "type": "object"}}, "$ref": "#/$defs/x"}),
    ] {
        let message = model.refused(&schema(&hidden));
        assert!(message.contains("$ref") || message.contains("$id"), "{message}");
    }
}

/// The library finds out when it comes there; a client is told before its request waits.
#[test]
fn a_schema_that_is_too_much_after_what_is_certain_is_refused() {
    let model = Model::bytes();
    let many: serde_json::Map<String, Value> = (0..600).map(|at| (format!("property{at}"), json!({"type": "string"}))).collect();
    let message = model.refused(&Grammar::JsonSchema(json!({"type": "object", "properties": many}).to_string().into()));
    assert!(message.contains("max is 2000"), "{message}");
    // What is certain for longer than is looked at is no reason.
    let long = "ab".repeat(5_000);
    assert!(model.compile(&Grammar::JsonSchema(json!({"const": long}).to_string().into())).is_ok());
}

#[test]
fn what_says_nothing_or_little_is_no_reason_to_refuse_a_schema() {
    let model = Model::bytes();
    let whole = json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX});
    let big = json!({"type": "integer", "minimum": 0, "exclusiveMaximum": 1e19});
    let real = json!({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308});
    let far = "\"2026-13-45\"";
    let cases: [(Value, &[&str], &[&str]); 8] = [
        (
            json!({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}),
            &["{\"a\": 1}"],
            &["{\"a\": null}"],
        ),
        (json!({"type": "string", "format": "binary"}), &["\"x\""], &["1"]),
        (
            json!({"properties": {"format": {"type": "string", "format": "int-64"}}, "required": ["format"], "additionalProperties": false}),
            &["{\"format\": \"x\"}"],
            &["{}"],
        ),
        (json!({"type": "string", "format": "date"}), &["\"2026-11-30\""], &[far]),
        (whole, &["0", "-7", "999999999999999872"], &["1.5", "99999999999999999999"]),
        (big, &["0", "123456789012345678"], &["-1"]),
        (real, &["0", "-1.5", "123456.75"], &["x"]),
        (
            json!({"const": {"format": "wibble", "maximum": i64::MAX, "propertyNames": true}}),
            &["{\"format\": \"wibble\", \"maximum\": 9223372036854775807, \"propertyNames\": true}"],
            &["{}"],
        ),
    ];
    for (schema, good, bad) in cases {
        let constraint = model.schema(&schema);
        for text in good {
            assert!(model.takes(&constraint, text), "{schema} takes {text:?}");
        }
        for text in bad {
            assert!(!model.takes(&constraint, text), "{schema} takes no {text:?}");
        }
    }
    for (schema, reason) in [
        (json!({"type": "object", "propertyNames": {"pattern": "^a"}}), "propertyNames"),
        (json!({"type": "integer", "minimum": 4e18}), "minimum"),
        (json!({"type": "number", "exclusiveMaximum": -1e300}), "exclusiveMaximum"),
    ] {
        let message = model.refused(&Grammar::JsonSchema(schema.to_string().into()));
        assert!(message.contains(reason), "{message}");
    }
}

#[test]
fn one_that_reaches_a_limit_in_the_middle_says_so_and_keeps_saying_it() {
    let model = Model::bytes();
    let rule = model.compile(&Grammar::Regex("(b|[cd](((a{100}){100}){100}){100})".into())).unwrap();
    let id = |text: &str| model.tokenizer.token_to_id(text).unwrap();
    let mut short = rule.clone();
    short.accept(id("b")).unwrap();
    assert!(short.complete());
    let mut long = rule.clone();
    long.accept(id("c")).unwrap();
    let error = (0..1_000_000).find_map(|_| long.accept(id("a")).err()).expect("it cannot be followed for ever");
    assert!(error.to_string().contains("cannot go on"), "{error}");
    assert!(long.mask(&mut [0; 16]).is_err() && long.accept(id("a")).is_err() && long.certain().is_err() && !long.complete());
}

#[test]
fn a_model_that_cannot_be_held_to_a_grammar_is_said_to_be_one() {
    let file = vocab::word_piece();
    let words = tokenizer(&file);
    let vocab_size = u32::try_from(words.vocab_size()).unwrap();
    let error = compile(words, vocab_size, &[0], &Grammar::JsonObject).unwrap_err();
    assert_eq!(error.code, Code::UnsupportedParameter);
    let model = Model::bytes();
    let error = compile(Arc::clone(&model.tokenizer), model.vocab_size(), &[], &Grammar::JsonObject).unwrap_err();
    assert!(error.code == Code::UnsupportedParameter && error.message.contains("ends an answer"), "{error}");
}
