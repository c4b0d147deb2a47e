//! Filters, tests and functions of the template environment: what transformers adds, and those of Jinja2's own whose Python meaning differs from
//! minijinja's. Everything not registered here is minijinja's.

use jiff::civil::DateTime;
use jiff::fmt::strtime::{BrokenDownTime, Config};
use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters};

use super::json::tojson;
use super::lazy::{Generator, is_lazy};
use super::python::{Ends, lines, strip};
use super::repr::string;
use super::source::EACH;

/// What `raise_exception` throws. It travels as the source of a minijinja error, so that a refusal can be told from a fault.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Raised(pub(super) String);

/// Fills `env` with everything of this module except the clock.
pub(super) fn install(env: &mut Environment<'_>) {
    env.set_unknown_method_callback(super::python::method);
    env.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
        let message = message.to_string();
        Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
    });
    env.add_function("joiner", minijinja_contrib::globals::joiner);
    env.add_filter("tojson", |value: &Value, args: Rest<ValueOrKwargs>| {
        let args = args.into_values();
        let (positional, named): (&[Value], Kwargs) = from_args(&args)?;
        tojson(value, positional, &named)
    });
    env.add_filter("string", string);
    env.add_filter("trim", |value: &Value, chars: Option<&str>| -> Result<Value, Error> {
        let text = string(value)?;
        Ok(Value::from(strip(text.as_str().unwrap_or_default(), chars, Ends::Both)))
    });
    env.add_filter("indent", indent);
    env.add_filter("default", default);
    env.add_filter("d", default);
    or_default(env, "int", Value::from_function(filters::int), Value::from(0));
    or_default(env, "float", Value::from_function(filters::float), Value::from(0.0));
    env.add_filter("wordcount", |value: &Value| -> Result<usize, Error> {
        let text = string(value)?;
        let words = text.as_str().unwrap_or_default().split(|ch: char| !(ch == '_' || ch.is_alphanumeric()));
        Ok(words.filter(|word| !word.is_empty()).count())
    });
    env.add_filter("center", |state: &mut State<'_, '_>, value: &Value, width: Option<usize>| {
        super::python::method(state, &string(value)?, "center", &[Value::from(width.unwrap_or(80))])
    });
    env.add_filter(EACH, |value: Value| match value.kind() {
        ValueKind::None => Err(Error::new(ErrorKind::InvalidOperation, "None cannot be walked")),
        _ => Ok(value),
    });
    lazy(env, "map", Value::from_function(filters::map));
    lazy(env, "select", Value::from_function(filters::select));
    lazy(env, "reject", Value::from_function(filters::reject));
    lazy(env, "selectattr", Value::from_function(filters::selectattr));
    lazy(env, "rejectattr", Value::from_function(filters::rejectattr));
    lazy(env, "unique", Value::from_function(filters::unique));
    // In Python a string is a sequence of characters and a dict has a length and items, which is all that these ask.
    env.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Undefined | ValueKind::String | ValueKind::Seq | ValueKind::Map)
            || (value.kind() == ValueKind::Iterable && !is_lazy(value))
    });
    // Functions and macros are the only values of this kind that a template meets.
    env.add_test("callable", |value: &Value| value.kind() == ValueKind::Plain);
    // minijinja walks None as if it were empty.
    env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    env.set_formatter(|out, _, value| {
        if value.is_undefined() {
            return Ok(());
        }
        if let Some(text) = value.as_str() {
            return out.write_str(text).map_err(Error::from);
        }
        let text = string(value)?;
        out.write_str(text.as_str().unwrap_or_default()).map_err(Error::from)
    });
}

/// Registers a filter whose Python counterpart is a generator.
fn lazy(env: &mut Environment<'_>, name: &'static str, eager: Value) {
    env.add_filter(name, move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
        Generator::wrap(&eager.call(state, &args.into_values())?)
    });
}

/// Registers a conversion that gives a default for what it cannot convert, where minijinja's gives an error.
fn or_default(env: &mut Environment<'_>, name: &'static str, strict: Value, zero: Value) {
    env.add_filter(name, move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
        let args = args.into_values();
        match strict.call(state, &args) {
            Err(_) if args.len() == 1 => Ok(zero.clone()),
            found => found,
        }
    });
}

/// `strftime_now(format)`: the time that `now` gives, in Python's format language.
pub(super) fn install_clock(env: &mut Environment<'_>, now: impl Fn() -> DateTime + Send + Sync + 'static) {
    env.add_function("strftime_now", move |format: &str| -> Result<String, Error> {
        let mut text = String::new();
        // An unknown directive is printed as it stands, as the C library does that Python asks.
        BrokenDownTime::from(now())
            .format_with_config(&Config::new().lenient(true), format, &mut text)
            .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("cannot format the time: {error}")))?;
        Ok(text)
    });
}

/// Jinja2's `default(value='', boolean=False)`: for what is undefined, or with `boolean` for what is false.
fn default(value: &Value, other: Option<Value>, boolean: Option<bool>, named: Kwargs) -> Result<Value, Error> {
    let other = other.map_or_else(|| named.get::<Option<Value>>("default_value"), |other| Ok(Some(other)))?;
    let boolean = boolean.map_or_else(|| named.get::<Option<bool>>("boolean"), |boolean| Ok(Some(boolean)))?;
    named.assert_all_used()?;
    let given = if boolean.unwrap_or(false) { value.is_true() } else { !value.is_undefined() };
    Ok(if given { value.clone() } else { other.unwrap_or_else(|| Value::from("")) })
}

/// Jinja2's `indent(width=4, first=False, blank=False)`: a line break at the end of the text stays.
fn indent(value: &Value, width: Option<Value>, first: Option<bool>, blank: Option<bool>, named: Kwargs) -> Result<String, Error> {
    let width = width.map_or_else(|| named.get::<Option<Value>>("width"), |width| Ok(Some(width)))?;
    let first = first.map_or_else(|| named.get::<Option<bool>>("first"), |first| Ok(Some(first)))?.unwrap_or(false);
    let blank = blank.map_or_else(|| named.get::<Option<bool>>("blank"), |blank| Ok(Some(blank)))?.unwrap_or(false);
    named.assert_all_used()?;
    let margin = match width {
        None => " ".repeat(4),
        Some(width) => match width.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(i64::try_from(width)?.max(0)).unwrap_or(0).min(1024)),
        },
    };
    let mut text = string(value)?.as_str().unwrap_or_default().to_owned();
    text.push('\n');
    let mut out = String::with_capacity(text.len() + margin.len());
    for (index, line) in lines(&text, false).into_iter().enumerate() {
        if index > 0 {
            out.push('\n');
        }
        if if index == 0 { first } else { blank || !line.is_empty() } {
            out.push_str(&margin);
        }
        out.push_str(line);
    }
    Ok(out)
}
