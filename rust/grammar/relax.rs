//! Takes out of a schema what says nothing, and what the library cannot read although it says little: what is left allows no answer that the schema forbids.

use serde_json::{Map, Value, json};

use super::bound::DATA;
use super::refused;
use crate::error::Result;

/// The formats that the library knows. Any other is a word about the text and no condition, as JSON Schema has it.
const FORMATS: [&str; 11] = ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"];
/// Keywords whose value has a schema for each name.
const NAMED: [&str; 5] = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];
/// Bounds from below, then from above.
const BOUNDS: [[&str; 2]; 2] = [["minimum", "exclusiveMinimum"], ["maximum", "exclusiveMaximum"]];
/// The largest number below 10^18 that a double holds: the library counts in 64 bits, and fails where a power of ten no longer fits.
const FARTHEST: i64 = 999_999_999_999_999_872;

/// The schema without these.
///
/// # Errors
/// `invalid_value` for bounds out of which no number within reach is left.
pub(super) fn relaxed(schema: Map<String, Value>) -> Result<Map<String, Value>> {
    let mut schema = schema;
    fields(&mut schema)?;
    Ok(schema)
}

fn fields(schema: &mut Map<String, Value>) -> Result<()> {
    // Every name is a string.
    if schema.get("propertyNames").is_some_and(|names| *names == json!({"type": "string"}) || *names == json!({}) || *names == json!(true))
    {
        schema.shift_remove("propertyNames");
    }
    if schema.get("format").and_then(Value::as_str).is_some_and(|format| !FORMATS.contains(&format)) {
        schema.shift_remove("format");
    }
    for (keywords, sign) in BOUNDS.into_iter().zip([-1.0, 1.0]) {
        for keyword in keywords {
            bound(schema, keyword, sign)?;
        }
    }
    for (key, value) in schema.iter_mut() {
        match value {
            Value::Object(named) if NAMED.contains(&key.as_str()) => named.values_mut().try_for_each(every)?,
            value if !DATA.contains(&key.as_str()) => every(value)?,
            _ => {}
        }
    }
    Ok(())
}

fn every(value: &mut Value) -> Result<()> {
    match value {
        Value::Object(schema) => fields(schema),
        Value::Array(items) => items.iter_mut().try_for_each(every),
        _ => Ok(()),
    }
}

/// A bound that is too far away is set to the farthest that the library can keep to. `sign`: which way it is far.
fn bound(schema: &mut Map<String, Value>, keyword: &str, sign: f64) -> Result<()> {
    // What is farthest is known exactly as a double.
    #[allow(clippy::cast_precision_loss)]
    let farthest = FARTHEST as f64;
    let Some(value) = schema.get_mut(keyword) else { return Ok(()) };
    let Some(number) = value.as_f64() else { return Ok(()) };
    if number * sign > farthest {
        *value = json!(if sign < 0.0 { -FARTHEST } else { FARTHEST });
    } else if number * sign < -farthest {
        return Err(refused(format!("{keyword} {value} is out of reach")).hint("use numbers between -10^18 and 10^18"));
    }
    Ok(())
}
