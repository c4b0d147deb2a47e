//! Filters, tests and functions of the template environment: what transformers adds, and those of Jinja2's own whose Python meaning differs from
//! minijinja's. Everything not registered here is minijinja's.

use jiff::civil::DateTime;
use jiff::fmt::strtime::{BrokenDownTime, Config};
use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters};

use super::json::{FloatNames, push_float, tojson};
use super::python::{Ends, Generator, as_float, strip};

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
    env.add_function("cycler", minijinja_contrib::globals::cycler);
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
    lazy(env, "map", Value::from_function(filters::map));
    lazy(env, "select", Value::from_function(filters::select));
    lazy(env, "reject", Value::from_function(filters::reject));
    lazy(env, "selectattr", Value::from_function(filters::selectattr));
    lazy(env, "rejectattr", Value::from_function(filters::rejectattr));
    lazy(env, "unique", Value::from_function(filters::unique));
    // In Python a string is a sequence of characters and a dict has a length and items, which is all that these ask.
    env.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Undefined | ValueKind::String | ValueKind::Seq | ValueKind::Map)
            || (value.kind() == ValueKind::Iterable && value.downcast_object_ref::<Generator>().is_none())
    });
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

/// Python's `str()`.
fn string(value: &Value) -> Result<Value, Error> {
    if value.kind() == ValueKind::String {
        return Ok(value.clone());
    }
    Ok(match as_float(value) {
        Some(number) => {
            let mut text = String::new();
            push_float(&mut text, number, FloatNames::Python);
            Value::from(text)
        }
        None => Value::from(value.to_string()),
    })
}
