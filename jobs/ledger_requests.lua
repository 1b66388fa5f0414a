-- Scripts on requests and their leases. The key layout and the prelude are in ledger.lua.

--@ claim
-- worker, token, count, preferred bucket or '', idle, lease ms, remember ms, patience ms.
-- Twice: the record gives the same answer, without what the token lost since.
even_when_full()
local token, count, until_ = ARGV[2], tonumber(ARGV[3]), now + ARGV[6]

local function waits(entry)
  local rid = string.match(entry, '|(.*)$')
  return call('HEXISTS', key.requests, rid) == 1 and call('HEXISTS', key.owners, rid) == 0, rid
end

local function take(list, most)
  local taken, seen = {}, {}
  while #taken < most do
    local entries = call('LPOP', list, most - #taken)
    if not entries then break end
    for _, entry in ipairs(entries) do
      local waiting, rid = waits(entry)
      if waiting and not seen[rid] then
        taken[#taken + 1], seen[rid] = entry, true
      end
    end
  end
  return taken
end

local function head(list)
  local entry = call('LINDEX', list, 0)
  while entry and not waits(entry) do
    call('LPOP', list)
    entry = call('LINDEX', list, 0)
  end
  return entry
end

-- The tenant's bucket whose head has waited longest; the preferred one before those that waited a little
-- longer. It is left in the end though it has work: a long job must not keep others from their turn.
local function longest_waiting(tenant, preferred)
  local found, least
  for _, bucket in ipairs(buckets) do
    local entry = head(queue[bucket] .. ':' .. tenant)
    local ms = entry and tonumber(string.match(entry, '^%d+'))
    if ms and bucket == preferred then ms = ms - ARGV[8] end
    if ms and (not least or ms < least) then found, least = bucket, ms end
  end
  return found
end

-- Of a suspect: how many workers died running it, and its bucket. In its JSON that name is the field's: in a
-- string the quotes would be escaped, and what may hold other names comes after it.
local function known_of(entry)
  local rid = string.match(entry, '|(.*)$')
  local bucket = string.match(call('HGET', key.requests, rid), '"bucket":(%d+)')
  return tonumber(call('HGET', key.attempts, rid) or 0), bucket
end

-- Those whose worker died once run together again, apart from all others: most deaths are the machine's, and
-- one must not cost a whole batch its batching. Who was there when a second worker died runs with an eighth as
-- many, or alone if there are no more, and then alone: where workers die often, all the innocent must not wait
-- for each other one by one.
local function suspects()
  local eighth = math.floor(count / 8)
  if call('LLEN', key.suspects) <= eighth then eighth = 1 end
  local taken, seen = take(key.suspects, 1), {}
  local deaths, bucket = known_of(taken[1])
  local most = ({count, eighth})[deaths] or 1
  seen[string.match(taken[1], '|(.*)$')] = true
  while #taken < most do
    local entry = head(key.suspects)
    if not entry then break end
    local rid, other_deaths, other_bucket = string.match(entry, '|(.*)$'), known_of(entry)
    if other_deaths ~= deaths or other_bucket ~= bucket then break end
    call('LPOP', key.suspects)
    if not seen[rid] then taken[#taken + 1], seen[rid] = entry, true end
  end
  return taken
end

-- Whoever was given least chooses the bucket and takes what it has there; the others fill up, in turn.
local function in_turn()
  local taken, whose, bucket = {}, {}, nil
  for _, tenant in ipairs(call('ZRANGE', key.turns, 0, -1)) do
    if not bucket then
      bucket = longest_waiting(tenant, ARGV[4])
      if bucket then call('HSET', key.given, '', call('ZSCORE', key.turns, tenant)) end
    end
    if bucket then
      local some = take(queue[bucket] .. ':' .. tenant, count - #taken)
      for _, entry in ipairs(some) do
        taken[#taken + 1] = entry
        whose[#taken] = tenant
      end
      if #some > 0 then give(key.turns, key.given, tenant, tenant, #some) end
    end
    leave(tenant)
    if #taken == count then break end
  end
  return taken, bucket or 0, 0, whose
end

local function grant(entries, bucket, alone, whose)
  for place, entry in ipairs(entries) do
    local ms, rid = string.match(entry, '^(%d+)|(.*)$')
    lease(rid, token, bucket, ms, whose and whose[place] or '', until_)
    if alone == 1 and #entries == 1 then call('SADD', key.alone, rid) end
  end
  local record = {bucket = tonumber(bucket), alone = alone, epoch = 0, entries = entries, requeued = 0}
  if #entries > 0 then record.epoch = next_epoch() end
  remember(record, ARGV[7])
  return granted(token, record)
end

local record = remembered()
if record then return granted(token, record) end
if head(key.suspects) then
  if ARGV[5] == '1' then return grant(suspects(), 0, 1) end
  if call('SET', key.drain, id, 'NX', 'PX', ARGV[6]) or call('GET', key.drain) == id then
    call('PEXPIRE', key.drain, ARGV[6])
    return grant({}, 0, 0)
  end
end
return grant(in_turn())

--@ start
-- '', (rid, token)... Marks them running; returns those that the token does not own.
even_when_full()
local gone = {}
for place = 2, #ARGV, 2 do
  if owner_of(ARGV[place]) == ARGV[place + 1] then
    call('SADD', key.running, ARGV[place])
  else
    gone[#gone + 1] = ARGV[place]
  end
end
return gone

--@ extend
-- lease ms, (rid, token)... Returns those that the token does not own. One that ran out but was not reaped
-- goes on.
even_when_full()
local gone = {}
for place = 2, #ARGV, 2 do
  if owner_of(ARGV[place]) == ARGV[place + 1] then
    call('ZADD', key.leases, now + ARGV[1], ARGV[place])
  else
    gone[#gone + 1] = ARGV[place]
  end
end
return gone

--@ release
-- '', (rid, token)... Back to the head, no attempt counted. Twice: the token owns nothing any more.
even_when_full()
for place = 2, #ARGV, 2 do
  local rid = ARGV[place]
  local token, bucket, ms, tenant = owner_of(rid)
  if token == ARGV[place + 1] then
    if tonumber(call('HGET', key.kills, rid) or 0) >= 2 then
      call('ZADD', key.leases, now, rid)  -- given up: it must not run, so the next reap hands it out again
    else
      unlease(rid)
      give_back(rid, bucket, ms, tenant)
    end
  end
end
put_back()
return {}

--@ complete
-- id, fingerprint, part, window, then (rid, token or '', row, failed, prompt, cached, completion, reasoning)...
-- Returns the refused rows. A row counts once: its done bit decides, so that nobody can double it.
-- Twice: the part is in the index. One of which nothing was accepted is not kept there, but neither a lost
-- token nor a done bit ever comes back, so the answer stays.
even_when_full()
local refused, kept = {}, 0
local state = field('state')
local place = call('HGET', key.part_index, ARGV[3])
if place then
  local entry = cjson.decode(call('LINDEX', key.parts, place))
  return entry.skip
end
if state == '' or terminal[state] then
  for at = 7, #ARGV, 8 do refused[#refused + 1] = tonumber(ARGV[at]) end
  return refused
end
local other = other_model(ARGV[2])
if other then return other end
local total, may, finished = tonumber(call('HGET', key.job, 'total') or 4294967296), {}, {}
local sums = {completed = 0, failed = 0, prompt = 0, cached = 0, completion = 0, reasoning = 0}
for at = 5, #ARGV, 8 do
  local rid, token, row, failed = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2]), ARGV[at + 3]
  if may[rid] == nil then
    may[rid] = token == '' or (key.owners ~= nil and owner_of(rid) == token)
    if may[rid] then finished[#finished + 1] = rid end
  end
  if may[rid] and row < total and call('SETBIT', key.done, row, 1) == 0 then
    kept = kept + 1
    if failed == '1' then sums.failed = sums.failed + 1 end
    if failed == '0' then sums.completed = sums.completed + 1 end
    sums.prompt, sums.cached = sums.prompt + ARGV[at + 4], sums.cached + ARGV[at + 5]
    sums.completion, sums.reasoning = sums.completion + ARGV[at + 6], sums.reasoning + ARGV[at + 7]
  else
    refused[#refused + 1] = row
  end
end
for name, sum in pairs(sums) do
  if sum > 0 then call('HINCRBY', key.job, name, sum) end
end
if call('HEXISTS', key.open_requests, id) == 1 then
  call('HINCRBY', key.open_requests, id, 0 - sums.completed - sums.failed)
  call('HINCRBY', key.open_tokens, id, 0 - sums.prompt)
  left('tokens', 0 - math.min(sums.prompt, number('left_tokens')))
end
for what, sum in pairs({finished = sums.completed + sums.failed, prompt = sums.prompt,
    completion = sums.completion}) do
  if sum > 0 then call('HINCRBY', key.work, what .. ':' .. field('fingerprint'), sum) end
end
if key.requests then forget(finished) end
if kept > 0 then
  local entry = '{"name":' .. cjson.encode(ARGV[3]) .. ',"skip":[' .. table.concat(refused, ',') .. ']}'
  call('HSET', key.part_index, ARGV[3], call('RPUSH', key.parts, entry) - 1)
end
if call('SCARD', key.live) * 2 <= window(ARGV[4]) then hasten('feed') end
settle()
return refused

--@ reap
-- '', token, lease ms, gap ms, grace ms, remember ms, most. Twice: the record gives the same answer.
-- When nobody reaped for a long time, Redis was away, and the workers get a grace to extend what they still
-- run.
even_when_full()
local record = remembered()
if record then return granted(ARGV[2], record) end
local last, grace = call('HGET', key.reaped, 'at'), tonumber(call('HGET', key.reaped, 'until') or 0)
if last and now - last > tonumber(ARGV[4]) then grace = now + ARGV[5] end
call('HSET', key.reaped, 'at', now, 'until', grace)
local most = ARGV[7]
if now < grace then most = 0 end
local given_up, requeued = {}, 0
for _, rid in ipairs(call('ZRANGEBYSCORE', key.leases, '-inf', now, 'LIMIT', 0, most)) do
  local _, bucket, ms, tenant = owner_of(rid)
  local ran, alone = unlease(rid)
  local entry = ms .. '|' .. rid
  if ran then call('HINCRBY', key.attempts, rid, 1) end
  if ran and alone then call('HINCRBY', key.kills, rid, 1) end
  if tonumber(call('HGET', key.kills, rid) or 0) >= 2 then
    lease(rid, ARGV[2], bucket, ms, tenant, now + ARGV[3])
    given_up[#given_up + 1] = entry
  elseif ran then
    call('RPUSH', key.suspects, entry)
  else
    give_back(rid, bucket, ms, tenant)
  end
  requeued = requeued + 1
end
put_back()
local record = {bucket = 0, alone = 0, epoch = 0, entries = given_up, requeued = requeued - #given_up}
if #given_up > 0 then record.epoch = next_epoch() end
remember(record, ARGV[6])
return granted(ARGV[2], record)
