//! Thoughts, words and calls told apart: for every family, at every cut, the same is found.

use std::collections::BTreeMap;
use std::sync::Arc;

use emberd::text::{Format, Kind, Parsed, Parser, Signatures};
use proptest::prelude::*;
use serde_json::{Value, json};

/// What a reader is told: thoughts `?…`, words `=…`, calls `name(arguments)`, with `!` behind those that were cut short.
fn told<'a>(template: &str, prompt: &str, pieces: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let mut parser = Parser::of(Format::of(template), Arc::new(tools()), prompt).unwrap();
    let (mut parsed, mut found, mut raw, mut shown, mut hidden) = (Parsed::default(), Vec::<String>::new(), 0, 0, 0);
    let mut last = None;
    let mut take = |parsed: &mut Parsed| {
        for (kind, text) in parsed.spans() {
            match (kind, found.last_mut()) {
                (Kind::Text | Kind::Reasoning, Some(before)) if last == Some(kind) => before.push_str(text),
                (Kind::Text, _) => found.push(format!("={text}")),
                (Kind::Reasoning, _) => found.push(format!("?{text}")),
                (Kind::Call, _) => found.push(format!("{text}(")),
                (Kind::Arguments, Some(call)) => call.push_str(text),
                (Kind::End { whole }, Some(call)) => call.push_str(if whole { ")" } else { "!" }),
                (kind, None) => panic!("{kind:?} without a call"),
            }
            last = Some(kind);
        }
        for passed in parsed.passed() {
            match passed {
                emberd::text::parsed::Passed::Shown(bytes) => shown += bytes,
                emberd::text::parsed::Passed::Hidden(bytes) => hidden += bytes,
            }
        }
        parsed.clear();
    };
    for piece in pieces {
        raw += piece.len();
        parser.push(piece, &mut parsed);
        take(&mut parsed);
    }
    parser.finish(&mut parsed);
    take(&mut parsed);
    // Every byte that was read is accounted for, and the words are what is said to be shown.
    assert_eq!(shown + hidden, raw);
    assert_eq!(shown, found.iter().filter_map(|part| part.strip_prefix('=')).map(str::len).sum::<usize>());
    found
}

pub fn tools() -> Signatures {
    let schema = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}, "exact": {"type": "boolean"},
    }});
    let mut tools = BTreeMap::from(["weather", "time", "ns__do"].map(|name| (name.to_owned(), schema.clone())));
    tools.insert("barred".to_owned(), Value::Bool(false));
    tools
}

/// The same at every pair of cuts, and one character at a time.
fn everywhere(template: &str, prompt: &str, text: &str, expected: &[&str]) {
    let places: Vec<usize> = (0..=text.len()).filter(|at| text.is_char_boundary(*at)).collect();
    for &first in &places {
        assert_eq!(told(template, prompt, [&text[..first], &text[first..]]), expected, "{text:?} cut at {first}");
    }
    let each: Vec<String> = text.chars().map(String::from).collect();
    assert_eq!(told(template, prompt, each.iter().map(String::as_str)), expected, "{text:?} by characters");
    for pair in places.windows(4).step_by(3) {
        let pieces = [&text[..pair[0]], &text[pair[0]..pair[3]], &text[pair[3]..]];
        assert_eq!(told(template, prompt, pieces), expected, "{text:?} cut around {}", pair[0]);
    }
}

pub const HERMES: &str = "<tool_call>";
pub const QWEN: &str = "<tool_call> <think></think>";
pub const CODER: &str = "<tool_call> <function=";
const GLM: &str = "<tool_call> <arg_key>";
const MISTRAL: &str = "[TOOL_CALLS]";
const MINISTRAL: &str = "[TOOL_CALLS] [THINK]";
const DEEPSEEK: &str = "<｜tool▁call▁begin｜> <think></think>";
const KIMI: &str = "<|tool_call_begin|>";
pub const LFM2: &str = "<|tool_list_start|>";
const GEMMA: &str = "<start_of_turn>";
const GEMMA4: &str = "<|tool_call> <|channel>thought";
const FUNCTION_GEMMA: &str = "<start_function_call>";
pub const LLAMA: &str = "Environment: ipython";
pub const HARMONY: &str = "<|channel|>analysis";
const SEED: &str = "<seed:tool_call> <seed:think>";
const MINIMAX: &str = "<minimax:tool_call> <think></think>";
const DSML: &str = "｜DSML｜ </think>";
const NEMOTRON: &str = "<TOOLCALL>";
const GRANITE: &str = "<|tool_call|>";
const COMMAND: &str = "<|START_ACTION|> <|START_THINKING|>";

#[test]
fn calls_of_every_family_are_found_at_every_cut() {
    let paris = r#"weather({"city": "Paris"})"#;
    for (template, text, expected) in [
        (HERMES, "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>", &[paris][..]),
        (
            HERMES,
            "Let me see.\n\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>\n<tool_call>{\"arguments\": {}, \"name\": \"time\"}</tool_call>\n",
            &["=Let me see.", paris, "time({})"],
        ),
        (
            HERMES,
            "<tool_call>{\"name\": \"time\"}</tool_call> then <tool_call>[{\"name\":\"weather\",\"parameters\":\"{\\\"city\\\": \\\"Paris\\\"}\"}]</tool_call> end",
            &["time({})", "=then", paris, "=end"],
        ),
        (HERMES, "<tool_call>{\"id\": [1, {}], \"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}, \"x\": 1.5e3}", &[paris]),
        (
            QWEN,
            "<think>\nHm.\n</think>\n\n<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}</tool_call>",
            &["?Hm.", paris],
        ),
        (
            CODER,
            "<tool_call>\n<function=weather>\n<parameter=city>\nPa\nr\"is\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
            &[r#"weather({"city": "Pa\nr\"is", "days": 3})"#],
        ),
        (
            CODER,
            "I do. <function=weather><parameter=where>{'a': True}</parameter></function>\n</tool_call>\n<tool_call><function=time></function></tool_call>",
            &["=I do.", r#"weather({"where": {"a":true}})"#, "time({})"],
        ),
        (CODER, "<function=weather>{\"city\": \"Paris\"}</function>", &[paris]),
        (
            GLM,
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>exact</arg_key><arg_value>true</arg_value></tool_call><tool_call>time</tool_call>",
            &[r#"weather({"city": "Paris", "exact": true})"#, "time({})"],
        ),
        (
            MISTRAL,
            "[TOOL_CALLS][{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}, {\"name\": \"time\", \"arguments\": {}}]",
            &[paris, "time({})"],
        ),
        (
            MISTRAL,
            "So:[TOOL_CALLS]weather[ARGS]{\"city\": \"Paris\"}[TOOL_CALLS]time[CALL_ID]123456789[ARGS]{}",
            &["=So:", paris, "time({})"],
        ),
        (MINISTRAL, "[THINK]Hm[/THINK][TOOL_CALLS]weather{\"city\": \"Paris\"}", &["?Hm", paris]),
        (
            DEEPSEEK,
            "I ask.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Paris\"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            &["=I ask.", paris, "time({})"],
        ),
        (
            DEEPSEEK,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"city\": \"Paris\"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            &[paris],
        ),
        (
            KIMI,
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{\"city\": \"Paris\"}<|tool_call_end|><|tool_calls_section_end|>",
            &[paris],
        ),
        (
            LFM2,
            "<|tool_call_start|>[weather(city=\"Paris\", days=2), time()]<|tool_call_end|>Done.",
            &[r#"weather({"city": "Paris", "days": 2})"#, "time({})", "=Done."],
        ),
        (GEMMA, "Sure:\n```tool_code\nprint(default_api.weather(city='Paris'))\n```", &["=Sure:", paris]),
        (GEMMA, "```tool_code\nweather(\"Paris\")\ntime()\n```", &[paris, "time({})"]),
        (
            GEMMA4,
            "<|channel>thought\nHm\n<channel|><|tool_call>call:weather{city:<|\"|>Par, }is<|\"|>,days:2}<tool_call|>",
            &["?Hm", r#"weather({"city": "Par, }is", "days": 2})"#],
        ),
        (FUNCTION_GEMMA, "<start_function_call>call:weather{city:<escape>Paris<escape>}<end_function_call>", &[paris]),
        (LLAMA, "{\"name\": \"weather\", \"parameters\": {\"city\": \"Paris\"}}", &[paris]),
        (
            LLAMA,
            "<|python_tag|>{\"type\": \"function\", \"name\": \"weather\", \"parameters\": {\"city\": \"Paris\"}}; {\"name\": \"time\", \"parameters\": {}}",
            &[paris, "time({})"],
        ),
        (
            HARMONY,
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"city\": \"Paris\"}<|call|>",
            &["?Hm.", paris],
        ),
        (
            HARMONY,
            "<|channel|>commentary<|message|>I ask.<|end|><|start|>assistant to=functions.time<|channel|>commentary json<|message|>{}<|call|>",
            &["=I ask.", "time({})"],
        ),
        (
            HARMONY,
            "<|channel|>analysis<|message|>Easy<|end|><|start|>assistant<|channel|>final<|message|> Four. <|return|>",
            &["?Easy", "=Four."],
        ),
        (
            SEED,
            "<seed:think>Hm</seed:think><seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>",
            &["?Hm", paris],
        ),
        (
            MINIMAX,
            "<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">Paris</parameter>\n</invoke>\n<invoke name=\"time\">\n</invoke>\n</minimax:tool_call>",
            &[paris, "time({})"],
        ),
        (
            DSML,
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">Paris</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
            &[paris],
        ),
        (NEMOTRON, "<TOOLCALL>[{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}]</TOOLCALL>", &[paris]),
        (GRANITE, "<|tool_call|>[{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}]", &[paris]),
        (
            COMMAND,
            "<|START_THINKING|>Hm<|END_THINKING|><|START_ACTION|>[\n  {\"tool_call_id\": \"0\", \"tool_name\": \"weather\", \"parameters\": {\"city\": \"Paris\"}}\n]<|END_ACTION|>",
            &["?Hm", paris],
        ),
    ] {
        everywhere(template, "", text, expected);
    }
}

#[test]
fn what_is_no_call_is_shown_as_it_is() {
    for (template, text, expected) in [
        (HERMES, "<tool_call>not json</tool_call>", &["=<tool_call>not json</tool_call>"][..]),
        (HERMES, "<tool_call>{bad}</tool_call>", &["=<tool_call>{bad}</tool_call>"]),
        (
            HERMES,
            "<tool_call>{\"name\": \"weather\", \"arguments\": {bad}}</tool_call>",
            &["=<tool_call>{\"name\": \"weather\", \"arguments\": {bad}}</tool_call>"],
        ),
        (HERMES, "<tool_call>{\"name\": \"weather\", \"argum", &["=<tool_call>{\"name\": \"weather\", \"argum"]),
        (HERMES, "a < b <tool", &["=a < b <tool"]),
        (HERMES, "Use the <tool_call> tag", &["=Use the <tool_call> tag"]),
        (HERMES, "Write\n\n<tool_call>\n{oops}\n</tool_call>\nso.", &["=Write\n\n<tool_call>\n{oops}\n</tool_call>\nso."]),
        (HERMES, " <tool_call> <tool_call> x", &["= <tool_call> <tool_call> x"]),
        (HERMES, "<tool_call>{\"name\": \"time\"}</tool_call> \n<tool_call> x", &["time({})", "=<tool_call> x"]),
        (LLAMA, " {\"name\": \"Bob\"}", &["= {\"name\": \"Bob\"}"]),
        (
            HERMES,
            "<tool_call>{\"name\": \"time\", \"arguments\": [1]}</tool_call>",
            &["=<tool_call>{\"name\": \"time\", \"arguments\": [1]}</tool_call>"],
        ),
        (CODER, "<function=a b>", &["=<function=a b>"]),
        (LLAMA, "{\"name\": \"Bob\", \"parameters\": {}}", &["={\"name\": \"Bob\", \"parameters\": {}}"]),
        (LLAMA, "{\"name\": \"time\"}", &["={\"name\": \"time\"}"]),
        (LLAMA, "Here: {\"name\": \"time\", \"parameters\": {}}", &["=Here: {\"name\": \"time\", \"parameters\": {}}"]),
        (MISTRAL, "[TOOL_CALLS]I do not know", &["=[TOOL_CALLS]I do not know"]),
        (LFM2, "<|tool_call_start|>[weather of Paris]<|tool_call_end|>", &["=<|tool_call_start|>[weather of Paris]<|tool_call_end|>"]),
        (GEMMA, "```python\nprint(1)\n```", &["=```python\nprint(1)\n```"]),
        (HARMONY, "plain words", &["=plain words"]),
        (QWEN, "I write <think> in a text", &["=I write <think> in a text"]),
        (HERMES, "two\n\nlines \n", &["=two\n\nlines \n"]),
        (HERMES, " \n", &["= \n"]),
    ] {
        everywhere(template, "", text, expected);
    }
}

#[test]
fn what_went_wrong_after_it_was_told_is_cut_short_and_shown() {
    let half = "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Par";
    everywhere(HERMES, "", half, &["weather({\"city\": \"Par!"]);
    let wrong = "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": Paris}}</tool_call>";
    everywhere(HERMES, "", wrong, &["weather({\"city\": !", &format!("={wrong}")]);
    everywhere(CODER, "", "<function=weather>\n<parameter=city>\nPar", &["weather({\"city\": \"Par!"]);
    everywhere(HARMONY, "", "<|channel|>commentary to=functions.time<|message|>{\"a\"", &["time({\"a\"!"]);
}

#[test]
fn a_whole_call_that_is_cut_in_its_last_mark_leaves_no_words() {
    let paris = r#"weather({"city": "Paris"})"#;
    for (template, call, close) in [
        (HERMES, "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}", "\n</tool_call>"),
        (NEMOTRON, "<TOOLCALL>[{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}]", "</TOOLCALL>"),
        (CODER, "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>", "\n</tool_call>"),
        (CODER, "<tool_call>\n<function=weather>\n{\"city\": \"Paris\"}", "\n</function>"),
        (DEEPSEEK, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"city\": \"Paris\"}", "\n```<｜tool▁call▁end｜>"),
        (LFM2, "<|tool_call_start|>[weather(city=\"Paris\")]", "<|tool_call_end|>"),
        (GEMMA, "```tool_code\nweather(\"Paris\")", "\n```"),
        (FUNCTION_GEMMA, "<start_function_call>call:weather{city:<escape>Paris<escape>}", "<end_function_call>"),
    ] {
        for end in (0..=close.len()).filter(|end| close.is_char_boundary(*end)) {
            everywhere(template, "", &format!("{call}{}", &close[..end]), &[paris]);
        }
    }
    let other = "<tool_call>{\"name\": \"time\"}";
    everywhere(HERMES, "", &format!("{other}</toolbox>"), &["time({})", "=</toolbox>"]);
}

#[test]
fn a_call_of_a_tool_that_may_not_be_called_is_text() {
    for (template, text) in [
        (HERMES, "<tool_call>{\"name\": \"barred\", \"arguments\": {\"city\": \"Paris\"}}</tool_call>"),
        (HERMES, "<tool_call>{\"arguments\": {\"city\": \"Paris\"}, \"name\": \"barred\"}</tool_call>"),
        (CODER, "<tool_call>\n<function=barred>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"),
        (GLM, "<tool_call>barred\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"),
        (MISTRAL, "[TOOL_CALLS]barred[ARGS]{\"city\": \"Paris\"}"),
        (DEEPSEEK, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>barred\n```json\n{}\n```<｜tool▁call▁end｜>"),
        (LFM2, "<|tool_call_start|>[barred(city=\"Paris\")]<|tool_call_end|>"),
        (FUNCTION_GEMMA, "<start_function_call>call:barred{city:<escape>Paris<escape>}<end_function_call>"),
        (LLAMA, "{\"name\": \"barred\", \"parameters\": {\"city\": \"Paris\"}}"),
    ] {
        everywhere(template, "", text, &[&format!("={text}")]);
    }
    everywhere(HARMONY, "", "<|channel|>commentary to=functions.barred<|message|>{}<|call|>", &["={}"]);
    everywhere(LFM2, "", "<|tool_call_start|>[time(), barred()]<|tool_call_end|>", &["time({})", "=, barred()]<|tool_call_end|>"]);
}

#[test]
fn a_brace_too_many_is_no_word() {
    let paris = r#"weather({"city": "Paris"})"#;
    let call = "{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}";
    everywhere(HERMES, "", &format!("<tool_call>\n{call}}}\n</tool_call>"), &[paris]);
    everywhere(HERMES, "", &format!("<tool_call>\n{call}}}\n}}</tool_call>\n<tool_call>{call}</tool_call> so"), &[paris, paris, "=so"]);
    everywhere(HERMES, "", &format!("<tool_call>{call}}}</tool_"), &[paris]);
    everywhere(NEMOTRON, "", &format!("<TOOLCALL>[{call}}}, {call}}}]</TOOLCALL>"), &[paris, paris]);
    everywhere(LLAMA, "", &format!("{call}}}"), &[paris]);
    everywhere(HERMES, "", &format!("<tool_call>{call}}} so"), &[paris, "=} so"]);
}

#[test]
fn a_thought_may_have_begun_in_the_prompt_and_may_not_end() {
    everywhere(QWEN, "…assistant\n<think>\n", "Hm.\n</think>\n\nFour.", &["?Hm.", "=Four."]);
    everywhere(QWEN, "…assistant\n<think>\n", "Hm. <thi", &["?Hm. <thi"]);
    everywhere(QWEN, "…assistant\n<think>\n\n</think>\n\n", "Four.", &["=Four."]);
    everywhere(QWEN, "", "<think>\n\n</think>\n\nFour.", &["=Four."]);
    everywhere(QWEN, "", "\n<think>a</think>b", &["?a", "=b"]);
}

#[test]
fn a_line_break_in_a_text_is_mended() {
    everywhere(
        HERMES,
        "",
        "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"a\nb\tc\"}}</tool_call>",
        &["weather({\"city\": \"a\\nb\\tc\"})"],
    );
}

#[test]
fn without_tools_calls_are_text_and_thoughts_are_still_thoughts() {
    assert!(Parser::of(Format::of(HERMES), Arc::default(), "").is_none());
    let mut parser = Parser::of(Format::of(QWEN), Arc::default(), "").unwrap();
    let mut parsed = Parsed::default();
    parser.push("<think>a</think><tool_call>{\"name\": \"time\"}</tool_call>", &mut parsed);
    parser.finish(&mut parsed);
    let found: Vec<(Kind, &str)> = parsed.spans().collect();
    assert_eq!(found, [(Kind::Reasoning, "a"), (Kind::Text, "<tool_call>{\"name\": \"time\"}</tool_call>")]);
}

/// Pieces of which models make calls, and other text.
pub fn scraps() -> impl Strategy<Value = String> {
    let scraps = prop::sample::select(vec![
        "<tool_call>",
        "</tool_call>",
        "{",
        "}",
        "{\"name\": \"weather\", \"arguments\": ",
        "{\"city\": \"Paris\"}",
        "\"",
        "<function=weather>",
        "<parameter=city>",
        "</parameter>",
        "</function>",
        "<think>",
        "</think>",
        "[TOOL_CALLS]",
        "weather",
        "[ARGS]",
        "[",
        "]",
        "(",
        ")",
        "city=",
        "'x'",
        ", ",
        "\n",
        " ",
        "é🙂",
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "call:",
        "<|tool_call>",
        "<tool_call|>",
        "<|\"|>",
        ":",
        "<|channel|>",
        "analysis",
        "<|message|>",
        "<|end|>",
        "<|start|>",
        "assistant",
        "to=functions.time",
        "<|call|>",
        "```tool_code\n",
        "```",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "function",
    ]);
    prop::collection::vec(scraps, 0..14).prop_map(|scraps| scraps.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn any_text_gives_the_same_however_it_is_cut(
        text in scraps(),
        family in prop::sample::select(vec![QWEN, CODER, GLM, MINISTRAL, DEEPSEEK, LFM2, GEMMA, GEMMA4, LLAMA, HARMONY]),
        cuts in prop::collection::vec(0_usize..200, 0..6),
    ) {
        let whole = told(family, "", [text.as_str()]);
        let each: Vec<String> = text.chars().map(String::from).collect();
        prop_assert_eq!(&told(family, "", each.iter().map(String::as_str)), &whole);
        let mut places: Vec<usize> = cuts.into_iter().filter(|at| text.is_char_boundary((*at).min(text.len()))).map(|at| at.min(text.len())).collect();
        places.extend([0, text.len()]);
        places.sort_unstable();
        let pieces = places.windows(2).map(|pair| &text[pair[0]..pair[1]]);
        prop_assert_eq!(&told(family, "", pieces), &whole);
        // Whole calls have whole arguments.
        for call in whole.iter().filter(|part| part.ends_with(')') && !part.starts_with(['=', '?'])) {
            let arguments = call[call.find('(').unwrap() + 1..].trim_end_matches(')');
            prop_assert!(serde_json::from_str::<Value>(arguments).is_ok_and(|value| value.is_object()), "{}", call);
        }
    }
}
